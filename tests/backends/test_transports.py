"""Each transport over real HTTP: equal completions whole and streamed, and rejected requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lockstep.backends.registry import TRANSPORTS, engine_of, open_transport
from lockstep.backends.transport import GenerateRequest, StreamDelta, Transport
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import (
    BadRequest,
    MissingFinish,
    PromptTooLong,
    Unavailable,
    UnknownModel,
)
from tests.backends.scripted import Reply, Request, Script, events, models, serving, whole
from tests.data.captures import load
from tests.protocol.responses import (
    IDS,
    LOGPROBS,
    PROMPT,
    dynamo_body,
    entry,
    generate_body,
    generate_choice,
    sglang_body,
)

SAMPLING = Sampling(stop_token_ids=(12,), max_tokens=4)
ROUTES = {
    "vllm": "/inference/v1/generate",
    "dynamo": "/v1/chat/completions",
    "dynamo-generate": "/inference/v1/generate",
    "sglang": "/generate",
}
NAMES = list(TRANSPORTS)


def owner_of(transport: str) -> str:
    return engine_of(transport).owned_by or ""


def request_of(**fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt_ids=PROMPT, sampling=fields.pop("sampling", SAMPLING), **fields)


def dynamo_events() -> Reply:
    chunks = []
    for at, last in ((0, False), (1, True)):
        choice = {
            "index": 0,
            "delta": {"content": "x"},
            "finish_reason": "stop" if last else None,
            "logprobs": {"content": [entry(IDS[at], LOGPROBS[at])]},
        }
        nvext: dict[str, Any] = {"completion_token_ids": [IDS[at]]}
        if last:
            nvext |= json.loads(dynamo_body())["nvext"]
        chunks.append(json.dumps({"id": "c", "choices": [choice], "nvext": nvext}).encode())
    usage = json.dumps({"id": "c", "choices": [], "usage": {}}).encode()
    return events(*chunks, usage, pause=0.01)


def vllm_events(*, finished: bool = True) -> Reply:
    chunks = []
    for at, last in ((0, False), (1, True)):
        chunk = generate_choice(
            token_ids=[IDS[at]],
            finish_reason="stop" if last and finished else None,
            weight_versions=generate_choice()["weight_versions"] if last else None,
            logprobs={"content": [entry(IDS[at], LOGPROBS[at])]},
        )
        chunks.append(generate_body(chunk))
    return events(*chunks)


def sglang_events() -> Reply:
    first = sglang_body(
        finish_reason=None, completion_tokens=1, output_ids=[11],
        output_token_logprobs=[[-0.5, 11, None]],
    )  # fmt: skip
    return events(first, sglang_body())


def script(name: str, length: int | None = 100) -> Script:
    def reply_to(request: Request) -> Reply:
        if request.path == "/v1/models":
            return models(owner_of(name), length, "ada")
        streamed = request.json.get("stream", False)
        if name == "vllm":
            return vllm_events() if streamed else whole(generate_body())
        if name == "dynamo":
            return dynamo_events() if streamed else whole(dynamo_body())
        if name == "sglang":
            return sglang_events() if streamed else whole(sglang_body())
        return whole(generate_body())

    return reply_to


async def collect(
    transport: Transport, one: GenerateRequest
) -> tuple[list[StreamDelta], list[Completion]]:
    deltas, completions = [], []
    async for item in transport.stream(one):
        (completions if isinstance(item, Completion) else deltas).append(item)
    return deltas, completions


@pytest.mark.parametrize("name", NAMES)
async def test_whole_and_streamed_give_equal_completions(name: Any) -> None:
    async with serving(script(name)) as server:
        transport = await open_transport(server.url, name)
        (completion,) = await transport.generate(request_of(request_id="r", model="m"))
        deltas, streamed = await collect(transport, request_of(request_id="r", model="m"))
        assert streamed == [completion]
        assert (completion.token_ids, completion.logprobs, completion.finish) == (
            IDS,
            LOGPROBS,
            "stop",
        )
        assert (completion.stop_token, completion.prompt_ids, completion.worker) == (
            12,
            PROMPT,
            server.url,
        )
        assert [token for delta in deltas for token in delta.token_ids] == IDS
        assert [value for delta in deltas for value in delta.logprobs] == LOGPROBS
        assert {request.path for request in server.requests} == {"/v1/models", ROUTES[name]}
        await transport.close()


@pytest.mark.failure_mode("F11")
@pytest.mark.parametrize("name", ["dynamo", "dynamo-generate", "sglang"])
async def test_n_is_n_requests_where_one_response_holds_one_choice(name: Any) -> None:
    sampling = Sampling(n=3, seed=5, stop_token_ids=(12,), max_tokens=4)
    async with serving(script(name)) as server:
        transport = await open_transport(server.url, name)
        completion = await transport.generate(request_of(sampling=sampling))
        assert [one.index for one in completion] == [0, 1, 2]
        sent = [request.json for request in server.requests_to(ROUTES[name])]
        params = [body.get("sampling_params", body) for body in sent]
        assert [one.get("n", 1) for one in params] == [1, 1, 1]
        assert {one.get("seed") or one.get("sampling_seed") for one in params} == {5, 6, 7}
        _, streamed = await collect(transport, request_of(sampling=sampling))
        assert [one.index for one in streamed] == [0, 1, 2]
        await transport.close()


async def test_vllm_returns_n_choices_in_one_response() -> None:
    def reply_to(request: Request) -> Reply:
        if request.path == "/v1/models":
            return models()
        assert request.json["sampling_params"]["n"] == 2
        return whole(generate_body(generate_choice(1), generate_choice(0)))

    async with serving(reply_to) as server:
        transport = await open_transport(server.url, "vllm")
        completion = await transport.generate(request_of(sampling=Sampling(n=2)))
        assert [one.index for one in completion] == [0, 1]
        await transport.close()


@pytest.mark.parametrize("name", ["dynamo", "sglang"])
async def test_one_failed_choice_fails_the_request_with_its_own_error(name: Any) -> None:
    good = script(name)

    def reply_to(request: Request) -> Reply:
        if request.path != "/v1/models" and len(server.requests_to(ROUTES[name])) == 2:
            return whole({"message": "no such thing", "code": 400}, 400)
        return good(request)

    async with serving(reply_to) as server:
        transport = await open_transport(server.url, name)
        with pytest.raises(BadRequest, match="no such thing"):
            await transport.generate(request_of(sampling=Sampling(n=3, max_tokens=1)))
        await transport.close()


@pytest.mark.failure_mode("F17")
@pytest.mark.parametrize("name", NAMES)
async def test_a_prompt_that_fills_the_context_is_not_sent(name: Any) -> None:
    async with serving(script(name, length=3)) as server:
        transport = await open_transport(server.url, name)
        for model in ("m", "ada", None):
            with pytest.raises(PromptTooLong, match=r"maximum context length is 3 .* has 3"):
                await transport.generate(request_of(model=model))
        assert server.requests_to(ROUTES[name]) == []
        assert len(server.requests_to("/v1/models")) == 1
        await transport.close()


@pytest.mark.failure_mode("F17")
async def test_a_failed_lookup_is_repeated_later() -> None:
    fails = [True]

    def reply_to(request: Request) -> Reply:
        if request.path == "/v1/models":
            return whole({"error": {"message": "starting"}}, 503) if fails[0] else models(length=3)
        return whole(generate_body())

    async with serving(reply_to) as server:
        transport = await open_transport(server.url, "vllm")
        transport._limits._retry_after = 0.0  # type: ignore[attr-defined]
        assert len(await transport.generate(request_of(model="m"))) == 1
        fails[0] = False
        with pytest.raises(PromptTooLong):
            await transport.generate(request_of(model="m"))
        await transport.close()


@pytest.mark.failure_mode("F18")
@pytest.mark.failure_mode("F14")
async def test_requests_are_rejected_before_anything_is_sent() -> None:
    async with serving(script("dynamo")) as server:
        transport = await open_transport(server.url, "dynamo")
        for bad in (
            request_of(sampling=Sampling(stop=("x",))),
            request_of(nvext={"foo": 1}),
            request_of(sampling=Sampling(logit_bias={1: 1.0}, n=2)),
        ):
            with pytest.raises(BadRequest):
                await transport.generate(bad)
        with pytest.raises(NotImplementedError, match="vllm"):
            await transport.generate(request_of(features={}))
        assert server.requests == []
        await transport.close()


@pytest.mark.failure_mode("F13")
async def test_a_truncated_stream_is_an_error_not_a_short_completion() -> None:
    def reply_to(request: Request) -> Reply:
        return models() if request.path == "/v1/models" else vllm_events(finished=False)

    async with serving(reply_to) as server:
        transport = await open_transport(server.url, "vllm")
        with pytest.raises(MissingFinish, match="choice 0"):
            await collect(transport, request_of())
        await transport.close()


async def test_an_error_in_the_middle_of_a_recorded_stream_is_raised() -> None:
    capture = load("dynamo", "lifecycle_kill9_stream")

    def reply_to(request: Request) -> Reply:
        return models("nvidia") if request.path == "/v1/models" else Reply(
            (capture.body[:100], capture.body[100:]), streamed=True
        )  # fmt: skip

    async with serving(reply_to) as server:
        transport = await open_transport(server.url, "dynamo")
        with pytest.raises(Unavailable, match="temporarily unavailable"):
            await collect(transport, request_of())
        await transport.close()


@pytest.mark.failure_mode("F47")
@pytest.mark.parametrize("name", NAMES)
async def test_a_cancelled_request_leaves_the_server_at_once(name: Any) -> None:
    def reply_to(request: Request) -> Reply:
        return models(owner_of(name)) if request.path == "/v1/models" else Reply(fault="hang")

    async with serving(reply_to) as server:
        transport = await open_transport(server.url, name)
        task = asyncio.create_task(transport.generate(request_of()))
        while not server.requests_to(ROUTES[name]):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.gone.wait(), 2)
        await transport.close()


async def test_a_lockstep_server_is_recognised_by_its_card_and_checked_for_its_version() -> None:
    def reply_to(request: Request) -> Reply:
        if request.path == "/v1/models":
            return models("lockstep")
        if request.path.endswith("abort_requests"):
            return whole({"aborted": 2})
        assert request.json["weight_version"] == "v1"
        return whole(generate_body(logprob_mode="processed", worker="w7"))

    async with serving(reply_to) as server:
        transport = await open_transport(server.url)
        (completion,) = await transport.generate(request_of(weight_version="v1", model="m"))
        assert (completion.worker, completion.logprob_mode) == ("w7", "processed")
        assert await transport.abort("r") == 2
        assert server.requests[-1].json == {"request_ids": ["generate-tokens-r"]}
        await transport.close()


async def test_an_adapter_that_a_lockstep_server_just_loaded_is_requested_in_its_dialect() -> None:
    def reply_to(request: Request) -> Reply:
        if request.path == "/v1/models":
            return models("lockstep")  # the list that was fetched before the adapter was there
        return whole(generate_body(logprob_mode=request.json["sampling_params"]["logprob_mode"]))

    async with serving(reply_to) as server:
        transport = await open_transport(server.url)
        await transport.generate(request_of(model="m", sampling=Sampling(logprob_mode="raw")))
        mine = request_of(model="new", sampling=Sampling(logprob_mode="raw"))
        (completion,) = await transport.generate(mine)
        assert completion.logprob_mode == "raw"
        await transport.close()


async def test_an_adapter_is_on_the_completion_and_unknown_models_stay_unknown() -> None:
    async with serving(script("sglang")) as server:
        transport = await open_transport(server.url, "sglang")
        (completion,) = await transport.generate(request_of(model="ada"))
        assert completion.adapter == "ada"
        assert server.requests_to("/generate")[0].json["lora_path"] == "ada"
        with pytest.raises(UnknownModel, match="nope"):
            await transport.generate(request_of(model="nope"))
        await transport.close()


async def test_sglang_needs_max_tokens_or_a_context_length() -> None:
    async with serving(script("sglang", length=None)) as server:
        transport = await open_transport(server.url, "sglang")
        with pytest.raises(BadRequest, match="max_tokens"):
            await transport.generate(request_of(sampling=Sampling()))
        await transport.close()
    async with serving(script("sglang", length=100)) as server:
        transport = await open_transport(server.url, "sglang")
        await transport.generate(request_of(sampling=Sampling()))
        assert server.requests_to("/generate")[0].json["sampling_params"]["max_new_tokens"] == 97
        await transport.close()


@pytest.mark.parametrize(("models_reply", "openapi", "workers", "name"), [
    (models("vllm"), None, None, "vllm"),
    (models("lockstep"), None, None, "vllm"),
    (models("sglang"), None, None, "sglang"),
    (whole(load("dynamo", "models").body), None, None, "dynamo"),
    (whole(load("vllm", "misc_models").body), None, None, "vllm"),
    (models("me"), {"paths": {"/inference/v1/generate": {}}}, None, "vllm"),
    (models("me"), {"paths": {"/generate": {}, "/get_model_info": {}}}, None, "sglang"),
    (models("me"), {"info": {"title": "NVIDIA Dynamo OpenAI Frontend"}}, None, "dynamo"),
    (whole({}, 503), None, {"protocol_version": 1, "workers": []}, "dynamo"),
])  # fmt: skip
async def test_a_server_is_recognised(
    models_reply: Reply, openapi: Any, workers: Any, name: str
) -> None:
    def reply_to(request: Request) -> Reply:
        body = {"/openapi.json": openapi, "/v1/rl/workers": workers}.get(request.path)
        if request.path == "/v1/models":
            return models_reply
        return whole({"detail": "Not Found"}, 404) if body is None else whole(body)

    async with serving(reply_to) as server:
        transport = await open_transport(server.url + "/v1/")
        assert transport.name == name
        await transport.close()


async def test_an_unknown_server_or_name_is_rejected_with_what_was_tried() -> None:
    async with serving(lambda _: whole({"detail": "Not Found"}, 404)) as server:
        with pytest.raises(Unavailable, match=r"/v1/models.*/openapi.json.*/v1/rl/workers"):
            await open_transport(server.url)
        with pytest.raises(BadRequest, match="dynamo-generate"):
            await open_transport(server.url, "grpc")  # type: ignore[arg-type]


async def test_model_cards_carry_length_parent_and_version() -> None:
    def reply_to(request: Request) -> Reply:
        return whole(load("vllm", "lora_models").body)

    async with serving(reply_to) as server:
        transport = await open_transport(server.url, "vllm")
        base, adapter = await transport.models()
        assert (base.id, base.max_model_len, base.parent) == ("tiny", 2048, None)
        assert (adapter.id, adapter.max_model_len, adapter.parent) == ("ad", 2048, "tiny")
        await transport.close()
