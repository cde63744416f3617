"""Client and gateway read the same ids alike: space, thinking, and calls with and without tools."""

from __future__ import annotations

from typing import Any

import pytest

import lockstep
from lockstep.client.turn import Turn
from lockstep.render import Renderer
from tests.gateway.chat.chat_server import TOOL, joined
from tests.gateway.chat.test_faults import answering, choice

QUESTION = [{"role": "user", "content": "What is 417 + 86?"}]
CALL = '<tool_call>\n{"name": "calc", "arguments": {"expression": "417 + 86"}}\n</tool_call>'
TEXTS = [
    "503",
    "  503\n\n",
    "",
    "   ",
    "<think>\nlet me see\n</think>\n\n 503 ",
    CALL,
    f"I will ask.\n{CALL}",
    f"{CALL}\n{CALL}",
    "<tool_call>\n{not json}\n</tool_call>",
    CALL.replace("calc", "other"),
    "<tool_call>\n{",
    "<tool_call>5044",
    f"{CALL} and then {CALL}\nfinally",
    "Sum: <tool_call>\n5044\n</tool_call> is it",
]


def shown(message: dict[str, Any]) -> tuple[Any, ...]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"] or "", message.get("reasoning_content") or None, calls


def of_turn(turn: Turn) -> tuple[Any, ...]:
    return *shown(turn.message), turn.finish


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["without tools", "with tools"])
@pytest.mark.parametrize("text", TEXTS)
async def test_client_and_gateway_parse_the_same_ids_alike(
    text: str, tools: list[Any] | None
) -> None:
    renderer = Renderer.load("tiny")
    ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
    extra = {} if tools is None else {"tools": tools}
    async with answering(*[choice(ids)] * 4) as (served, server):
        replied = (await served.post(model="m", messages=QUESTION, **extra))["choices"][0]
        (streamed,) = joined(await served.chunks(model="m", messages=QUESTION, **extra))
        async with lockstep.connect(server.url, "m", tokenizer="tiny", transport="vllm") as policy:
            turn = await policy.chat(tools=tools).send(QUESTION)
            (single,) = await policy.generate(QUESTION, tools=tools)
    whole = (*shown(replied["message"]), replied["finish_reason"])
    assert of_turn(turn) == of_turn(single) == whole
    assert streamed["content"] == whole[0]
    assert (streamed["reasoning"] or None) == whole[1]
    if tools is None:
        assert (turn.tool_calls, turn.finish) == ((), "stop")


async def test_legacy_function_calls_continue_in_a_session() -> None:
    renderer = Renderer.load("tiny")
    ids = [*renderer.encode(CALL), renderer.stop_token_ids[0]]
    session = {"x-session-id": "old"}
    async with answering(choice(ids), choice(ids), choice([5])) as (served, _):
        body = {"model": "m", "messages": QUESTION, "functions": [TOOL["function"]]}
        replied = (await served.post(headers=session, **body))["choices"][0]
        chunks = await served.chunks(**body)
        message = replied["message"]
        assert "tool_calls" not in message
        assert replied["finish_reason"] == "function_call"
        assert message["function_call"]["name"] == "calc"
        deltas = [chunk["choices"][0]["delta"].get("function_call") for chunk in chunks]
        assert message["function_call"] in deltas
        result = {"role": "function", "name": "calc", "content": "503"}
        again = await served.http.post(
            "/v1/chat/completions",
            json={**body, "messages": [*QUESTION, message, result]},
            headers=session,
        )
        assert again.headers["x-lockstep-bridged"] == "true"


async def test_user_and_metadata_are_stored_with_the_turn() -> None:
    sent = {"user": "u1", "metadata": {"task": "7"}, "store": True, "service_tier": "auto",
            "safety_identifier": "s", "prompt_cache_key": "k"}  # fmt: skip
    async with answering(choice([5])) as (served, _):
        await served.post(model="m", messages=QUESTION, headers={"x-session-id": "notes"}, **sent)
        (sample,) = await served.sessions.samples("notes")
    assert sample.notes == (sent,)


async def test_verbosity_is_refused_unless_the_template_has_it() -> None:
    async with answering(choice([5])) as (served, _):
        await served.post(model="m", messages=QUESTION, verbosity="medium")
        error = await served.refusal(model="m", messages=QUESTION, verbosity="high")
    assert error["param"] == "verbosity"


@pytest.mark.failure_mode("F54")
@pytest.mark.parametrize(
    ("text", "content", "error"),
    [
        ("<tool_call>5044", "<tool_call>5044", "unclosed_block"),
        (
            "Sum: <tool_call>\n5044\n</tool_call> is it",
            "Sum: <tool_call>\n5044\n</tool_call> is it",
            "missing_name",
        ),
        (f"One.\n{CALL} Two.<tool_call>{{</tool_call>3",
         "One.\n Two.<tool_call>{</tool_call>3", "invalid_json"),
        (f"One.\n{CALL} Two.", "One.\n Two.", None),
        (f"{CALL}\n{CALL}\n", "", None),
        ("<think>\nHm.\n</think>\n\n<tool_call>5", "<tool_call>5", "unclosed_block"),
    ],
)  # fmt: skip
async def test_a_malformed_call_stays_in_the_content_with_a_parse_error(
    text: str, content: str, error: str | None
) -> None:
    renderer = Renderer.load("tiny")
    ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
    async with answering(choice(ids)) as (served, server):
        body = {"model": "m", "messages": QUESTION, "tools": [TOOL]}
        replied = (await served.post(headers={"x-session-id": "s"}, **body))["choices"][0]
        chunks = await served.chunks(**body)
        (streamed,) = joined(chunks)
        async with lockstep.connect(server.url, "m", tokenizer="tiny", transport="vllm") as policy:
            turn = await policy.chat(tools=[TOOL]).send(QUESTION)
        (sample,) = await served.sessions.samples("s")
    assert (replied["message"]["content"] or "") == streamed["content"] == turn.text == content
    sent = [
        replied.get("tool_parse_error"),
        chunks[-1]["choices"][0].get("tool_parse_error"),
        turn.tool_parse_error,
    ]
    assert [each and each.partition(":")[0] for each in sent] == [error] * 3
    assert sample.tool_parse_errors == (error is not None)


async def test_tools_that_are_only_read_are_not_in_the_prompt() -> None:
    renderer = Renderer.load("tiny")
    ids = [*renderer.encode(CALL), renderer.stop_token_ids[0]]
    async with answering(choice(ids)) as (_, server):
        async with lockstep.connect(server.url, "m", tokenizer="tiny", transport="vllm") as policy:
            turn = await policy.chat(call_tools=[TOOL]).send(QUESTION)
    assert [call.name for call in turn.tool_calls] == ["calc"]
    assert turn.prompt_ids == renderer.render(QUESTION)
