"""What is sent: each option once, in its dialect's place; what would be lost is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.dynamo.encode_chat import PLACEHOLDER, encode_dynamo
from lockstep.protocol.sglang.generate import check_layout, encode_sglang
from lockstep.protocol.vllm.encode_generate import (
    encode_dynamo_generate,
    encode_lockstep,
    encode_vllm,
)
from lockstep.protocol.vllm.generate_request import decode_request
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest, BadTokenId, UnknownField, UnsupportedField
from lockstep.tokens.grammar import Grammar

PROMPT = [5, 6, 7]
STOP = Sampling(stop_token_ids=(9,))


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt_ids=PROMPT, sampling=fields.pop("sampling", STOP), **fields)


def encode(dialect: str, one: GenerateRequest) -> dict[str, Any]:
    body = {
        "vllm": lambda: encode_vllm(one, mode="raw"),
        "lockstep": lambda: encode_lockstep(one),
        "dynamo": lambda: encode_dynamo(one, mode="processed"),
        "dynamo-generate": lambda: encode_dynamo_generate(one, mode="processed"),
        "sglang": lambda: encode_sglang(one, mode="processed", max_new_tokens=4, adapter=None),
    }[dialect]()
    return json.loads(body)


DIALECTS = ["vllm", "lockstep", "dynamo", "dynamo-generate", "sglang"]


def places(value: Any, wanted: Any, path: str = "") -> list[str]:
    """Every path in a body at which `wanted` stands."""
    if isinstance(value, dict):
        return [at for key, one in value.items() for at in places(one, wanted, f"{path}.{key}")]
    if value == wanted and type(value) is type(wanted):
        return [path]
    return []


@pytest.mark.failure_mode("F03")
@pytest.mark.parametrize(("dialect", "place"), [
    ("vllm", ".cache_salt"), ("lockstep", ".cache_salt"), ("dynamo", ".nvext.cache_salt"),
    ("dynamo-generate", ".cache_salt"), ("sglang", ".extra_key"),
])  # fmt: skip
def test_the_salt_is_sent_once_in_its_place(dialect: str, place: str) -> None:
    assert places(encode(dialect, request(cache_salt="pepper")), "pepper") == [place]


@pytest.mark.failure_mode("F04")
@pytest.mark.parametrize(("dialect", "place", "sign"), [
    ("vllm", ".priority", 1), ("lockstep", ".priority", 1), ("dynamo-generate", ".priority", 1),
    ("dynamo", ".nvext.agent_hints.priority", -1), ("sglang", ".priority", -1),
])  # fmt: skip
def test_the_priority_is_sent_once_with_its_sign(dialect: str, place: str, sign: int) -> None:
    body = encode(dialect, request(priority=-77))
    assert places(body, sign * -77) == [place]
    assert places(body, sign * 77) == []


@pytest.mark.failure_mode("F03")
@pytest.mark.failure_mode("F04")
def test_a_callers_nvext_is_merged_and_never_sent_twice() -> None:
    nvext = {
        "cache_salt": "pepper",
        "agent_hints": {"priority": 3, "osl": 10},
        "extra_fields": ["timing", "engine_data"],
        "backend_instance_id": 14158359886483287760,
    }
    sent = encode("dynamo", request(nvext=nvext, cache_salt="pepper", priority=-3))["nvext"]
    assert sent["cache_salt"] == "pepper"
    assert sent["agent_hints"] == {"priority": 3, "osl": 10}
    assert sent["backend_instance_id"] == 14158359886483287760
    assert sent["extra_fields"] == ["engine_data", "completion_token_ids", "worker_id", "timing"]
    for clash in ({"cache_salt": "salt"}, {"agent_hints": {"priority": 4}}):
        with pytest.raises(BadRequest, match="one place"):
            encode("dynamo", request(nvext=clash, cache_salt="pepper", priority=-3))


@pytest.mark.parametrize(("nvext", "named"), [
    ({"foo": 1, "bar": 2}, "bar, foo"), ({"extra_fields": ["token_ids"]}, "token_ids"),
])  # fmt: skip
def test_nvext_that_dynamo_would_not_take_is_refused_by_name(nvext: Any, named: str) -> None:
    with pytest.raises(UnknownField, match=named):
        encode("dynamo", request(nvext=nvext))


@pytest.mark.failure_mode("F10")
def test_dynamo_gets_the_ids_beside_one_placeholder() -> None:
    sampling = Sampling(max_tokens=4, logprobs=3, prompt_logprobs=0, stop_token_ids=(9,), top_k=5)
    body = encode("dynamo", request(sampling=sampling))
    assert body["nvext"]["token_data"] == PROMPT
    assert body["messages"] == [{"role": "user", "content": PLACEHOLDER}]
    assert body["max_completion_tokens"] == 4
    assert (body["logprobs"], body["top_logprobs"], body["prompt_logprobs"]) == (True, 3, 0)
    assert (body["stop_token_ids"], body["top_k"]) == ([9], 5)
    assert "prompt_logprobs" in body["nvext"]["extra_fields"]
    assert encode("dynamo", request())["logprobs"] is True
    assert encode("dynamo", request())["top_k"] == -1


@pytest.mark.failure_mode("F14")
@pytest.mark.parametrize("dialect", ["dynamo", "dynamo-generate"])
def test_stop_strings_are_refused_where_they_would_lose_data(dialect: str) -> None:
    with pytest.raises(UnsupportedField, match="stop_token_ids"):
        encode(dialect, request(sampling=Sampling(stop=("END",))))
    sent = encode("vllm", request(sampling=Sampling(stop=("END",))))
    assert sent["sampling_params"]["stop"] == ["END"]


@pytest.mark.parametrize(("dialect", "fields", "param"), [
    ("dynamo", {"sampling": Sampling(logit_bias={3: 1.0})}, "logit_bias"),
    ("dynamo", {"sampling": Sampling(n=2)}, "n"),
    ("dynamo", {"weight_version": "v1"}, "weight_version"),
    ("vllm", {"min_weight_version": "v1"}, "min_weight_version"),
    ("vllm", {"sampling": Sampling(logprob_mode="processed")}, "logprob_mode"),
    ("dynamo", {"sampling": Sampling(temperature=0.5, score_start=1,
                                     logprob_mode="processed")}, "score_start"),
    ("sglang", {"sampling": Sampling(grammar=Grammar("choice", '["a"]'))}, "grammar"),
    ("dynamo-generate", {"sampling": Sampling()}, "stop_token_ids"),
    ("sglang", {"sampling": Sampling(allowed_token_ids=(1,))}, "allowed_token_ids"),
    ("sglang", {"weight_version": "v1"}, "weight_version"),
])  # fmt: skip
def test_what_a_server_would_ignore_is_refused_by_name(
    dialect: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        encode(dialect, request(**fields))
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("dialect", ["dynamo", "dynamo-generate", "sglang"])
def test_multimodal_says_which_transport_can(dialect: str) -> None:
    with pytest.raises(NotImplementedError, match="vllm"):
        encode(dialect, request(features={"mm_hashes": {}}))


def test_lockstep_reads_exactly_what_was_requested() -> None:
    sampling = Sampling(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, max_tokens=5, min_tokens=2,
        stop_token_ids=(9,), ignore_eos=True, n=2, allowed_token_ids=(1, 2),
        logit_bias={4: -1.5}, logprobs=3, prompt_logprobs=1, logprob_mode="processed",
    )  # fmt: skip
    one = request(sampling=sampling, weight_version="v3", min_weight_version="v2", experts_start=1,
              model="m", request_id="r")  # fmt: skip
    body = decode_request(encode_lockstep(one, stream=True))
    assert body.sampling() == sampling
    assert (body.weight_version, body.min_weight_version) == ("v3", "v2")
    assert (body.experts_start, body.stream) == (1, True)
    assert (body.model, body.request_id, body.token_ids) == ("m", "r", PROMPT)


def test_plain_vllm_is_sent_no_field_it_would_not_know() -> None:
    body = encode(
        "vllm", request(experts_start=0, sampling=Sampling(logprobs=2, logprob_mode="raw"))
    )
    assert not {"return_routed_experts", "weight_version"} & body.keys()
    params = body["sampling_params"]
    assert "logprob_mode" not in params
    assert params["routed_experts_prompt_start"] == 0
    assert params["logprobs"] == 3, "vLLM counts the sampled token among them"
    assert encode("vllm", request())["sampling_params"]["logprobs"] == 0


THINKS = (
    '{"type": "structural_tag", "format": {"type": "tag", "begin": "<think>",'
    ' "content": {"type": "any_text"}, "end": "</think>"}}'
)


@pytest.mark.parametrize(
    ("grammar", "ended"),
    [(Grammar("structural_tag", THINKS), True), (Grammar("json_object"), None), (None, None)],
)
def test_vllm_begins_a_grammar_that_holds_a_thought_with_the_first_token(
    grammar: Grammar | None, ended: bool | None
) -> None:
    one = request(sampling=Sampling(stop_token_ids=(9,), grammar=grammar))
    assert encode("vllm", one).get("reasoning_ended") is ended
    decode_request(encode_vllm(one, mode="raw"))
    assert "reasoning_ended" not in encode("lockstep", one)


@pytest.mark.failure_mode("F18")
@pytest.mark.parametrize(("ids", "named"), [
    ([], "empty"), ([1, -2], r"prompt_ids\[1\] is -2"), ([1, 2.0], r"prompt_ids\[1\] is 2\.0"),
    ([1, "2"], r"prompt_ids\[1\]"), ([True, 2], r"prompt_ids\[0\]"),
    ([1, None], r"prompt_ids\[1\]"), ([1, [2]], r"prompt_ids\[1\]"), ((1, 2), "tuple"),
    ([np.int64(3)], r"prompt_ids\[0\].*tolist"),
])  # fmt: skip
def test_bad_ids_never_leave_the_client(ids: list[Any], named: str) -> None:
    with pytest.raises(BadTokenId, match=named):
        GenerateRequest(prompt_ids=ids)


@pytest.mark.parametrize("fields", [
    {"cache_salt": ""}, {"experts_start": 4}, {"experts_start": -1}, {"timeout": 0},
    {"priority": 2**63},
])  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        request(**fields)
    assert caught.value.param == next(iter(fields))


def test_n_requests_differ_in_seed_and_id() -> None:
    several = request(sampling=Sampling(n=3, seed=7), request_id="r")
    alone = [several.alone(index) for index in range(3)]
    assert [(one.sampling.n, one.sampling.seed) for one in alone] == [(1, 7), (1, 8), (1, 9)]
    assert [one.request_id for one in alone] == ["r-0", "r-1", "r-2"]


def test_sglang_experts_need_their_layout() -> None:
    with pytest.raises(BadRequest, match="experts_layout"):
        check_layout(request(experts_start=0), None)
