"""A worker's faults reach the chat client as errors, and its request reaches the worker once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lockstep.render import Renderer
from tests.backends import scripted
from tests.gateway.chat.chat_server import REVERSE, TOOL, Served, chat_server, joined

GENERATE = "/inference/v1/generate"
Choice = dict[str, Any]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load("tiny")


def choice(ids: list[int], finish: str | None = "stop", index: int = 0, **more: Any) -> Choice:
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": -0.5, "rank": 1}
        for token in ids
    ]
    spans = [{"version": "v7", "start": 0, "end": len(ids)}] if ids else []
    return {"index": index, "token_ids": ids, "finish_reason": finish, "weight_versions": spans,
            "logprobs": {"content": content}, **more}  # fmt: skip


@asynccontextmanager
async def answering(
    *choices: Choice | Callable[[Any], Choice],
) -> AsyncIterator[tuple[Served, scripted.Server]]:
    """A gateway whose worker responds with these choices, one request after the other."""
    left = list(choices)

    def script(request: scripted.Request) -> scripted.Reply:
        if request.path != GENERATE:
            return scripted.models("lockstep", 4096)
        one = left.pop(0) if len(left) > 1 else left[0]
        made = one(request.json) if callable(one) else one
        if request.json.get("stream"):
            return scripted.events(json.dumps({"choices": [made]}).encode())
        return scripted.whole({"request_id": "r", "choices": [made], "logprob_mode": "raw"})

    async with scripted.serving(script) as server, chat_server(server.url) as served:
        yield served, server


def sent(server: scripted.Server) -> Any:
    (request,) = server.requests_to(GENERATE)
    return request.json


@pytest.mark.failure_mode("F03")
@pytest.mark.parametrize(
    "where", [{"cache_salt": "s"}, {"nvext": {"cache_salt": "s"}},
              {"cache_salt": "s", "nvext": {"cache_salt": "s"}}]
)  # fmt: skip
async def test_a_cache_salt_reaches_the_engine_once(where: dict[str, Any]) -> None:
    async with answering(choice([5])) as (served, server):
        await served.post(model="m", messages=REVERSE, **where)
        assert sent(server)["cache_salt"] == "s"
        assert json.dumps(sent(server)).count("cache_salt") == 1


@pytest.mark.failure_mode("F04")
@pytest.mark.parametrize(
    "where", [{"priority": -3}, {"nvext": {"agent_hints": {"priority": 3}}},
              {"priority": -3, "nvext": {"agent_hints": {"priority": 3}}}]
)  # fmt: skip
async def test_a_priority_reaches_the_engine_once_and_with_its_sign(where: dict[str, Any]) -> None:
    async with answering(choice([5])) as (served, server):
        await served.post(model="m", messages=REVERSE, **where)
        assert sent(server)["priority"] == -3
        assert json.dumps(sent(server)).count("priority") == 1


def breach(mode: str, reason: str, bad: Choice) -> Any:
    return pytest.param(bad, reason, marks=pytest.mark.failure_mode(mode), id=f"{mode}-{reason}")


def scored(logprob: float | None) -> Choice:
    return {**choice([5]), "logprobs": {"content": [{"token_id": 5, "logprob": logprob}]}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        breach("F05", "bad_logprob", scored(None)),
        breach("F06", "misaligned", {**choice([5, 6]), "token_ids": [5]}),
        breach("F07", "misaligned", {**choice([5, 6]), "token_ids": [5, 7]}),
        breach("F08", "missing_token_ids", {**choice([5, 6]), "token_ids": None}),
        breach("F13", "missing_finish", choice([5, 6], finish=None)),
        breach("F15", "bad_logprob", scored(-9999.0)),
    ],
)
async def test_a_response_that_breaks_the_contract_is_an_error(
    bad: Choice, reason: str, stream: bool
) -> None:
    async with answering(bad) as (served, _):
        body = {"model": "m", "messages": REVERSE, "stream": stream}
        response = await served.http.post("/v1/chat/completions", json=body)
        # After the first token a failure can only be the last event.
        lines = [line for line in response.text.splitlines() if line]
        last = lines[-2] if response.status_code == 200 else response.text
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["reason"]) == (502, reason)
        assert error["request_id"]


@pytest.mark.failure_mode("F09")
@pytest.mark.parametrize("stream", [False, True])
async def test_no_token_at_all_is_a_valid_response(stream: bool) -> None:
    async with answering(choice([], finish="length")) as (served, _):
        body = {"model": "m", "messages": REVERSE, "return_token_ids": True, "logprobs": True}
        if stream:
            (part,) = joined(await served.chunks(**body))
            assert (part["ids"], part["content"], part["finish"]) == ([], "", "length")
        else:
            (one,) = (await served.post(**body))["choices"]
            assert (one["token_ids"], one["message"]["content"]) == ([], "")
            assert one["logprobs"]["content"] == []


@pytest.mark.failure_mode("F12")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_is_reported_and_keeps_its_tokens(renderer: Renderer, stream: bool) -> None:
    ids = renderer.encode("31")
    async with answering(choice(ids, finish="abort")) as (served, _):
        body = {"model": "m", "messages": REVERSE, "return_token_ids": True}
        headers = {"x-session-id": "aborted"}
        if stream:
            (part,) = joined(await served.chunks(**body, headers=headers))
            assert (part["ids"], part["finish"]) == (ids, "abort")
        else:
            (one,) = (await served.post(**body, headers=headers))["choices"]
            assert (one["token_ids"], one["finish_reason"]) == (ids, "abort")
        (sample,) = await served.sessions.samples("aborted")
        assert sample.aborts == 1
        assert not any(sample.sampled_mask)


@pytest.mark.failure_mode("F16")
async def test_how_the_logprobs_were_made_is_on_the_response() -> None:
    async with answering(choice([5])) as (served, _):
        response = await served.post(
            model="m", messages=REVERSE, nvext={"extra_fields": ["engine_data"]}
        )
        data = response["nvext"]["engine_data"]
        assert data["logprob_mode"] == "raw"
        assert data["weight_version"] == "v7"
        assert response["system_fingerprint"] == "lockstep-v7"


@pytest.mark.failure_mode("F20")
async def test_thinking_that_the_template_would_drop_stays_in_the_prompt(
    renderer: Renderer,
) -> None:
    close = renderer.stop_token_ids[0]
    ids = [*renderer.encode("<think>\nSo.\n</think>\n\n31204"), close]
    async with answering(choice(ids)) as (served, server):
        headers = {"x-session-id": "thinks"}
        first = await served.post(model="m", messages=REVERSE, headers=headers)
        message = first["choices"][0]["message"]
        assert message["content"] == "31204"
        assert message["reasoning"] == message["reasoning_content"] == "So."
        forgetful = {"role": "assistant", "content": "31204"}
        await served.post(model="m", messages=[*REVERSE, forgetful, *REVERSE], headers=headers)
        one, two = (request.json["token_ids"] for request in server.requests_to(GENERATE))
        assert two[: len(one) + len(ids)] == one + ids


@pytest.mark.failure_mode("F19")
async def test_a_stream_of_thinking_and_calls_adds_up_token_by_token(renderer: Renderer) -> None:
    call = '<tool_call>\n{"name": "calc", "arguments": {"expression": "1 + 1"}}\n</tool_call>'
    text = f"<think>\nHm é😀.\n</think>\n\nI will <b>.\n{call}\n{call}"
    ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
    events = [choice([token], finish=None, weight_versions=None) for token in ids[:-1]]
    events.append(choice(ids[-1:], weight_versions=[{"version": "1", "start": 0, "end": len(ids)}]))

    def script(request: scripted.Request) -> scripted.Reply:
        if request.path != GENERATE:
            return scripted.models("lockstep", 4096)
        if not request.json.get("stream"):
            return scripted.whole({"request_id": "r", "choices": [choice(ids)]})
        return scripted.events(*(json.dumps({"choices": [event]}).encode() for event in events))

    async with scripted.serving(script) as server, chat_server(server.url) as served:
        body = {"model": "m", "messages": REVERSE, "tools": [TOOL], "logprobs": True,
                 "return_token_ids": True}  # fmt: skip
        (whole,) = (await served.post(**body))["choices"]
        chunks = await served.chunks(**body)
        (part,) = joined(chunks)
    message = whole["message"]
    assert message["reasoning"] == part["reasoning"] == "Hm é😀."
    assert message["content"] == part["content"] == "I will <b>."
    assert message["tool_calls"] == part["calls"]
    assert len(part["calls"]) == 2
    assert part["ids"] == whole["token_ids"] == ids
    assert part["entries"] == whole["logprobs"]["content"]
    assert part["finish"] == whole["finish_reason"] == "tool_calls"
    with_calls = [c["choices"][0] for c in chunks if c["choices"][0]["delta"].get("tool_calls")]
    assert len(with_calls) == 2, "each call comes when it is whole"
    assert "<tool_call>" in renderer.decode(with_calls[0]["token_ids"])
    assert len(chunks) > 8, "text comes as it is sampled"
    assert chunks[1]["choices"][0]["logprobs"]["content"], "and so do its logprobs"
