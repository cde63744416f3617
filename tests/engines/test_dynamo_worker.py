"""The parts of a Dynamo worker that need no Dynamo: requests, chunks, routes, environment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine import Engine, EngineOptions
from lockstep.engine.sampler import Sampled
from lockstep.engine.sequence import StreamedToken
from lockstep.protocol.dynamo import environment as dynamo_env
from lockstep.tokens import Completion, VersionSpan
from lockstep.tokens.errors import BadRequest, EngineFailure, UnknownField, UnsupportedField
from lockstep.tokens.grammar import Grammar
from lockstep.worker.dynamo.chunks import chunks_of, collect
from lockstep.worker.dynamo.request import decimal, read_request
from lockstep.worker.dynamo.routes import engine_routes
from lockstep.worker.dynamo.worker import run_dynamo_worker
from lockstep.worker.options import WorkerOptions
from lockstep.worker.system import SystemPlane
from tests.worker.adapters import write_adapter


def chat(**changes: Any) -> dict[str, Any]:
    """What Dynamo 1.6.1 hands to a worker for a chat request with token data."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "token_ids": [50, 20, 30],
        "stop_conditions": {
            "max_tokens": 4, "stop": None, "stop_token_ids": [77], "stop_token_ids_hidden": [505],
            "min_tokens": None, "ignore_eos": None, "max_thinking_tokens": None,
        },
        "sampling_options": {
            "n": None, "temperature": 0.699999988079071, "top_p": 0.8999999761581421, "top_k": -1,
            "min_p": 0.0, "seed": 5, "use_beam_search": None, "guided_decoding": None,
        },
        "output_options": {"logprobs": 1, "prompt_logprobs": None},
        "annotations": [],
        "routing": {"cache_salt": "s", "priority": 3},
        "extra_args": {"nvext": {"extra_fields": ["engine_data"], "token_in": True}},
    }  # fmt: skip
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            fields[part] = {**fields[part], field: value}
        else:
            fields[part] = value
    return fields


def read(**changes: Any) -> Any:
    return read_request(chat(**changes), has_experts=False)


@pytest.mark.failure_mode("F03")
@pytest.mark.failure_mode("F04")
def test_a_chat_request_arrives_as_it_was_sent() -> None:
    request = read()
    body, sampling = request.body, request.body.sampling()
    assert request.engine_data
    assert not request.verbatim
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 0)
    assert (sampling.max_tokens, sampling.seed) == (4, 5)
    assert sampling.stop_token_ids == (77, 505)
    assert body.cache_salt == "s"
    assert body.priority == -3, "Dynamo's higher is sooner, the engine's lower is"


def test_an_adapter_is_named_by_the_routing() -> None:
    assert read(routing__lora_name="math").body.model == "math"


@pytest.mark.failure_mode("F38")
def test_experts_are_requested_by_annotation_or_extra_field() -> None:
    assert read().body.experts_start is None
    assert read(annotations=["lockstep.experts:2"]).body.experts_start == 2
    fields = {"nvext": {"extra_fields": ["routed_experts"]}}
    assert read(extra_args=fields).body.experts_start == 0
    with pytest.raises(UnsupportedField, match="row number"):
        read(annotations=["lockstep.experts:x"])


@pytest.mark.failure_mode("F14")
def test_what_the_frontend_would_lose_is_refused() -> None:
    with pytest.raises(UnsupportedField, match="stop_token_ids"):
        read(stop_conditions__stop=["a"])
    with pytest.raises(UnsupportedField, match="send n requests"):
        read(sampling_options__n=2)
    plain = {"nvext": {"extra_fields": []}}
    assert read(stop_conditions__stop=["a"], extra_args=plain).engine_data is False


def test_penalties_and_grammars_of_the_frontend_reach_the_engine() -> None:
    guided = {"json": {"type": "object"}, "regex": None, "backend": "xgrammar"}
    request = read(
        sampling_options__guided_decoding=guided, sampling_options__repetition_penalty=1.5
    )
    sampling = request.body.sampling()
    assert sampling.repetition_penalty == 1.5
    assert sampling.grammar == Grammar("json", '{"type":"object"}')
    assert read().body.sampling().grammar is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling_options__guided_decoding": {"novel": "x"}}, "novel"),
        ({"sampling_options__use_beam_search": True}, "use_beam_search"),
        ({"stop_conditions__max_thinking_tokens": 9}, "thinking_token_budget"),
        ({"extra_args": {"sampling_options": {"bad_words_token_ids": [[1]]}}}, "bad_words"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(change: Any, named: str) -> None:
    with pytest.raises((UnsupportedField, UnknownField), match=named):
        read(**change)


@pytest.mark.failure_mode("F16")
def test_the_generate_route_is_read_as_it_was_sent() -> None:
    sent = {
        "request_id": "r", "model": "tiny", "stream": False, "cache_salt": "x", "priority": 2,
        "sampling_params": {"temperature": 0.7, "max_tokens": 4, "logit_bias": {"5": 1.0}},
    }  # fmt: skip
    request = read(extra_args={"vllm_tito": sent})
    assert request.verbatim
    assert request.body.priority == 2
    sampling = request.body.sampling()
    assert sampling.logit_bias == {5: 1.0}
    assert sampling.logprob_mode == "processed", "its responses have no field for another one"
    assert request.body.experts_start is None
    moe = read_request(chat(extra_args={"vllm_tito": sent}), has_experts=True)
    assert moe.body.experts_start == 0
    with pytest.raises(BadRequest, match="temperature"):
        read(extra_args={"vllm_tito": {**sent, "sampling_params": {"temperature": "hot"}}})


@pytest.mark.parametrize("value", [0.7, 0.9, 1.0, 1.3, 0.05, 1e-4])
def test_decimals_survive_32_bits(value: float) -> None:
    import numpy as np

    assert decimal(float(np.float32(value))) == value


def piece(token: int, completion: Completion | None = None) -> StreamedToken:
    return StreamedToken(0, Sampled(token, -0.5, 1, ()), completion)


def completion(tokens: int, finish: Any = "stop") -> Completion:
    return Completion(
        token_ids=list(range(tokens)), logprobs=[-0.5] * tokens, prompt_ids=[1],
        finish=finish, versions=(VersionSpan("v1", 0, tokens),),
    )  # fmt: skip


async def test_tokens_are_sent_together_and_the_end_with_the_last() -> None:
    async def pieces() -> AsyncIterator[StreamedToken]:
        for token in range(199):
            yield piece(token)
            await asyncio.sleep(0)
        yield piece(199, completion(200))

    groups = [group async for group in collect(pieces(), seconds=5.0, most=64)]
    assert [p.sampled.token_id for g in groups for p in g if p.sampled] == list(range(200))
    assert len(groups) <= 5
    [last] = chunks_of(groups[-1], engine_data=True)
    assert last["token_ids"][-1] == 199
    assert last["finish_reason"] == "stop"
    assert last["engine_data"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 200}]


async def test_an_error_of_the_engine_comes_after_its_tokens() -> None:
    async def pieces() -> AsyncIterator[StreamedToken]:
        yield piece(1)
        raise EngineFailure("broken")

    groups = collect(pieces(), seconds=0.01)
    assert len(await anext(groups)) == 1
    with pytest.raises(EngineFailure, match="broken"):
        await anext(groups)


@pytest.mark.failure_mode("F47")
async def test_closing_the_chunks_stops_the_engine() -> None:
    ended = asyncio.Event()

    async def pieces() -> AsyncIterator[StreamedToken]:
        try:
            yield piece(1)
            await asyncio.Event().wait()
        finally:
            ended.set()

    groups = collect(pieces(), seconds=0.01)
    await anext(groups)
    await groups.aclose()
    async with asyncio.timeout(5):
        await ended.wait()


@pytest.mark.failure_mode("F12")
def test_an_abort_says_so_where_dynamo_cannot_change_it() -> None:
    [chunk] = chunks_of([piece(0, completion(1, "abort"))], engine_data=True)
    assert chunk["finish_reason"] == "cancelled"
    assert chunk["engine_data"]["finish_reason"] == "abort"
    assert chunk["engine_data"]["finished"] is False


class Names:
    """Stands for Dynamo's list of models."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.refuses = False

    async def add(self, name: str) -> None:
        if self.refuses:
            raise EngineFailure("no")
        self.names.append(name)

    async def remove(self, name: str) -> None:
        self.names.remove(name)


async def test_routes_answer_errors_and_name_adapters(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a"))
    names = Names()
    async with Engine("tiny", EngineOptions(arithmetic="close")) as engine:
        system = SystemPlane(engine, "")
        routes = engine_routes(system, names)
        assert set(routes) == set(system.methods)
        assert (await routes["get_weight_version"](None))["version"] == "default"
        bad = await routes["stage"]({"nonsense": 1})
        assert (bad["status"], bad["reason"], bad["code"]) == ("error", "unknown_field", 400)
        assert (await routes["commit"]([1]))["reason"] == "bad_request"
        load = {"lora_name": "math", "lora_path": path}
        for hot_swap in (False, True):
            assert (await routes["load_lora_adapter"](load))["hot_swap"] is hot_swap
            assert names.names == ["math"]
        assert (await routes["unload_lora_adapter"]({"lora_name": "math"}))["status"] == "ok"
        assert names.names == []
        names.refuses = True
        assert (await routes["load_lora_adapter"](load))["reason"] == "engine_failure"
        assert not engine.adapters, "what the frontend cannot find is not kept"


def test_one_machine_needs_no_settings_and_others_are_left_alone(tmp_path: Path) -> None:
    local = dynamo_env.complete({}, tmp_path)
    assert local["DYN_DISCOVERY_BACKEND"] == "file"
    assert local["DYN_FILE_KV"] == str(tmp_path)
    hosts = {name: value for name, value in local.items() if name.endswith("_HOST")}
    assert set(hosts.values()) == {"127.0.0.1"}
    assert len(hosts) == 4
    cluster = dynamo_env.complete({"DYN_DISCOVERY_BACKEND": "etcd", "DYN_SYSTEM_HOST": "0.0.0.0"})
    assert "DYN_TCP_RPC_HOST" not in cluster
    assert cluster["DYN_SYSTEM_HOST"] == "0.0.0.0"


def test_a_system_port_that_dynamo_cannot_read_is_refused() -> None:
    with pytest.raises(BadRequest, match="at most 32767"):
        run_dynamo_worker(WorkerOptions(model="tiny", system_port=40_000))
