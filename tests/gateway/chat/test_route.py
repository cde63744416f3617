"""Chat over HTTP, in front of a real worker: OpenAI's contract, and every token of the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lockstep.backends.registry import open_transport
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.dynamo.nvext import instance_id
from lockstep.render import Renderer
from lockstep.tokens import Completion, Ranked, Sampling
from tests.gateway.chat.chat_server import CHAT, REVERSE, SUM, TOOL, Served, joined
from tests.processes import WorkerProcess


async def test_a_response_has_openai_s_shape_and_the_engine_s_tokens(
    served: Served, renderer: Renderer
) -> None:
    response = await served.post(
        messages=REVERSE, temperature=0, return_token_ids=True, logprobs=True
    )
    (choice,) = response["choices"]
    assert response["id"].startswith("chatcmpl-")
    assert response["object"] == "chat.completion"
    assert response["prompt_token_ids"] == renderer.render(REVERSE)
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert text == choice["message"]["content"] + "<|im_end|>"
    assert response["usage"]["prompt_tokens"] == len(response["prompt_token_ids"])
    assert response["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert choice["weight_versions"][0]["end"] == len(choice["token_ids"])


@pytest.mark.failure_mode("F44")
async def test_logprobs_are_bit_identical_to_the_worker_s_own(
    served: Served, worker: WorkerProcess, renderer: Renderer
) -> None:
    prompt = renderer.render(REVERSE)
    _, direct = await worker.generate(prompt, seed=5, max_tokens=24, logprobs=3)
    theirs = direct["choices"][0]
    options = {"seed": 5, "max_tokens": 24, "logprobs": True, "return_token_ids": True}
    whole = await served.post(messages=REVERSE, top_logprobs=3, **options)
    parts = joined(await served.chunks(messages=REVERSE, top_logprobs=3, **options))
    mine = whole["choices"][0]
    expected = [entry["logprob"] for entry in theirs["logprobs"]["content"]]
    assert mine["token_ids"] == parts[0]["ids"] == theirs["token_ids"]
    assert [entry["logprob"] for entry in mine["logprobs"]["content"]] == expected
    assert parts[0]["entries"] == mine["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in parts[0]["entries"])
    dynamo = await served.post(
        messages=REVERSE, seed=5, max_tokens=24, nvext={"extra_fields": ["engine_data"]}
    )
    assert dynamo["nvext"]["engine_data"]["completion_logprobs"] == expected


@pytest.mark.failure_mode("F44")
@pytest.mark.failure_mode("F46")
async def test_a_client_of_dynamo_gets_the_same_completion(
    served: Served, worker: WorkerProcess, renderer: Renderer
) -> None:
    request = GenerateRequest(
        prompt_ids=renderer.render(REVERSE),
        sampling=Sampling(
            seed=5,
            max_tokens=24,
            logprobs=2,
            prompt_logprobs=1,
            stop_token_ids=renderer.stop_token_ids,
        ),
        model="tiny",
        cache_salt="salt",
        priority=-2,
    )
    direct = await open_transport(worker.url)
    dynamo = await open_transport(served.url, "dynamo")
    try:
        (expected,) = await direct.generate(request)
        (whole,) = await dynamo.generate(request)
        *deltas, streamed = [item async for item in dynamo.stream(request)]
    finally:
        await direct.close()
        await dynamo.close()
    assert isinstance(streamed, Completion)
    assert deltas
    for completion in (whole, streamed):
        for field in ("token_ids", "logprobs", "prompt_ids", "finish", "versions", "top_logprobs",
                      "prompt_logprobs", "logprob_mode", "stop_token"):  # fmt: skip
            assert _plain(getattr(completion, field)) == _plain(getattr(expected, field)), field


def _plain(value: Any) -> Any:
    """Without ranks: Dynamo's dialect has no place for those of alternatives."""
    if isinstance(value, Ranked):
        return value.token_id, value.logprob
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


@pytest.mark.failure_mode("F11")
async def test_every_choice_has_its_own_tokens(served: Served) -> None:
    options = {"messages": SUM, "n": 4, "seed": 3, "return_token_ids": True, "logprobs": True}
    response = await served.post(**options)
    choices = response["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 1
    for choice, part in zip(choices, joined(await served.chunks(**options), 4), strict=True):
        assert part["ids"] == choice["token_ids"]
        assert part["entries"] == choice["logprobs"]["content"]
    error = await served.refusal(
        messages=SUM, n=2, nvext={"extra_fields": ["completion_token_ids"]}
    )
    assert "n is 2" in error["message"]


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F19")
async def test_tool_calls_are_parsed_out_and_no_token_with_them(
    served: Served, renderer: Renderer
) -> None:
    options = {
        "messages": SUM, "tools": [TOOL], "n": 8, "seed": 1, "return_token_ids": True,
        "logprobs": True, "max_tokens": 64,
    }  # fmt: skip
    response = await served.post(**options)
    parts = joined(await served.chunks(**options), 8)
    called = [c for c in response["choices"] if c["finish_reason"] == "tool_calls"]
    assert called, "the model calls the tool in about half of its answers"
    for choice, part in zip(response["choices"], parts, strict=True):
        message = choice["message"]
        assert part["content"] == (message["content"] or "")
        assert part["calls"] == message.get("tool_calls", [])
        assert part["finish"] == choice["finish_reason"]
        assert part["ids"] == choice["token_ids"]
        assert part["entries"] == choice["logprobs"]["content"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    call = called[0]["message"]["tool_calls"][0]
    assert call["function"]["name"] == "calc"
    assert json.loads(call["function"]["arguments"])
    assert "<tool_call>" in renderer.decode(called[0]["token_ids"])


async def test_with_tool_choice_none_a_call_is_text(served: Served) -> None:
    options = {"messages": SUM, "tools": [TOOL], "tool_choice": "none", "n": 8, "seed": 1}
    response = await served.post(**options, max_tokens=64)
    assert not any("tool_calls" in choice["message"] for choice in response["choices"])
    contents = [choice["message"]["content"] for choice in response["choices"]]
    assert any("<tool_call>" in text for text in contents)
    parts = joined(await served.chunks(**options, max_tokens=64), 8)
    assert [part["content"] for part in parts] == contents


@pytest.mark.failure_mode("F10")
@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/tokens"])
async def test_ids_of_the_request_are_the_prompt_and_messages_are_ignored(
    served: Served, renderer: Renderer, path: str
) -> None:
    ids = renderer.render(REVERSE)
    placeholder = [{"role": "user", "content": "(token-in mode)"}]
    response = await served.post(
        path, messages=placeholder, tokens=ids, temperature=0, return_token_ids=True
    )
    assert response["prompt_token_ids"] == ids
    dynamo = await served.post(
        messages=placeholder,
        temperature=0,
        nvext={
            "token_data": ids,
            "extra_fields": ["prompt_token_ids", "completion_token_ids", "worker_id", "timing"],
        },
    )
    extension = dynamo["nvext"]
    assert extension["prompt_token_ids"] == ids
    assert extension["completion_token_ids"] == response["choices"][0]["token_ids"]
    assert extension["timing"]["total_time_ms"] > 0
    (only,) = served.pool.workers
    assert extension["worker_id"]["decode_worker_id"] == instance_id(only.id)
    error = await served.refusal(f"{CHAT}/tokens", messages=placeholder)
    assert error["param"] == "tokens"


async def test_a_stream_in_dynamo_s_shape_has_deltas_and_engine_data_last(served: Served) -> None:
    fields = ["engine_data", "completion_token_ids"]
    chunks = await served.chunks(
        messages=REVERSE,
        temperature=0,
        nvext={"extra_fields": fields},
        stream_options={"include_usage": True},
    )
    (part,) = joined(chunks)
    *_, last, usage = chunks
    assert last["nvext"]["engine_data"]["completion_token_ids"] == part["nvext"]
    assert all("engine_data" not in chunk.get("nvext", {}) for chunk in chunks[:-2])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(part["nvext"])


async def test_a_request_can_be_pinned_to_a_worker(served: Served) -> None:
    (only,) = served.pool.workers
    for name in (only.id, instance_id(only.id)):
        await served.post(messages=REVERSE, max_tokens=1, nvext={"backend_instance_id": name})
    error = await served.refusal(messages=REVERSE, nvext={"backend_instance_id": 12345})
    assert str(instance_id(only.id)) in error["message"]


@pytest.mark.failure_mode("F40")
async def test_tokens_that_are_half_a_character_keep_their_bytes(
    served: Served, renderer: Renderer
) -> None:
    half, rest = renderer.encode("é")[:1], renderer.encode("é")[1:]
    assert rest, "the tiny vocabulary has no token for this letter"
    options = {
        "messages": REVERSE, "max_tokens": 3, "logprobs": True, "return_token_ids": True,
        "allowed_token_ids": half, "min_tokens": 3,
    }  # fmt: skip
    response = await served.post(**options)
    for entry in response["choices"][0]["logprobs"]["content"]:
        assert entry["bytes"] == [0xC3]
        assert entry["token"] == "bytes:\\xc3"
    (part,) = joined(await served.chunks(**options))
    assert part["content"] == response["choices"][0]["message"]["content"]
    named = await served.post(**options, return_tokens_as_token_ids=True)
    entries = named["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{half[0]}"] * 3
    assert entries[0]["bytes"] == [0xC3]


async def test_a_message_is_continued_where_it_ends(served: Served, renderer: Renderer) -> None:
    messages = [*REVERSE, {"role": "assistant", "content": "312"}]
    response = await served.post(
        messages=messages,
        continue_final_message=True,
        add_generation_prompt=False,
        return_token_ids=True,
        temperature=0,
        max_tokens=4,
    )
    assert renderer.decode(response["prompt_token_ids"]).endswith("312")
    ids = response["choices"][0]["token_ids"]
    text = renderer.decode([token for token in ids if token not in renderer.stop_token_ids])
    assert response["choices"][0]["message"]["content"] == text


async def test_prompt_logprobs_and_template_variables_reach_where_they_must(
    served: Served, renderer: Renderer
) -> None:
    response = await served.post(
        messages=REVERSE,
        max_tokens=1,
        prompt_logprobs=1,
        return_token_ids=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    prompt = response["prompt_token_ids"]
    assert renderer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert response["prompt_logprobs"][0] is None
    own = response["prompt_logprobs"][1][str(prompt[1])]
    assert own["logprob"] < 0
    assert own["decoded_token"] == renderer.pieces.piece(prompt[1]).text
    for kwargs, param in (
        ({"add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt"),
        ({"no_such_variable": 1}, "chat_template_kwargs.no_such_variable"),
        ({"enable_thinking": {"a": 1}}, "chat_template_kwargs"),
    ):
        error = await served.refusal(messages=REVERSE, chat_template_kwargs=kwargs)
        assert error["param"] == param


@pytest.mark.failure_mode("F47")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_stops_the_engine(
    served: Served, worker: WorkerProcess, stream: bool
) -> None:
    body = {"messages": REVERSE, "max_tokens": 900, "min_tokens": 900, "stream": stream}
    task = asyncio.create_task(served.http.post(CHAT, json=body))
    async with asyncio.timeout(20):
        while not (await worker.get("/health"))[1]["running"]:
            await asyncio.sleep(0)
        task.cancel()
        while (await worker.get("/health"))[1]["running"]:
            await asyncio.sleep(0)
        while served.pool.in_flight:
            await asyncio.sleep(0)


async def test_errors_name_the_request_and_its_field(served: Served) -> None:
    error = await served.refusal(status=404, model="nope", messages=REVERSE)
    assert error["type"] == "NotFoundError"
    error = await served.refusal(messages=REVERSE, bogus=1, headers={"x-request-id": "mine"})
    assert (error["param"], error["request_id"]) == ("bogus", "mine")
    error = await served.refusal(tokens=[1, 999999], messages=[], max_tokens=1)
    assert "999999" in error["message"]
    response = await served.http.post(
        CHAT, json={"messages": REVERSE, "max_tokens": 1}, headers={"x-request-id": "mine"}
    )
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "chatcmpl-mine"
