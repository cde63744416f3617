"""Models that think do so before a schema or a demanded call holds them, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.dialects import DialectServer, scripted_worker
from tests.processes import WorkerProcess

CHAT = "/v1/chat/completions"
THOUGHT = "It is about words. <tool_call> might do."
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
CALLS = [{"name": "look", "arguments": {"word": "sea"}}]
RULES: list[dict[str, Any]] = [
    {"when": {"last": "think, then call"}, "think": THOUGHT, "calls": CALLS},
    {"when": {"last": "an empty thought"},
     "raw": '<think>\n\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'},
    {"when": {"last": "only call"}, "calls": CALLS},
    {"when": {"last": "think, then answer"}, "think": THOUGHT, "say": '{"word": "sea"}'},
    {"when": {"last": "think, then talk"}, "think": THOUGHT, "say": "The sea."},
]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "look"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with scripted_worker(tmp_path_factory.mktemp("script"), RULES) as process:
        yield process


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}],
            "max_tokens": 200, **more}  # fmt: skip


def called(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message["tool_calls"]]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize(
    ("text", "thought"),
    [("think, then call", THOUGHT), ("an empty thought", None), ("only call", None)],
)
async def test_a_thought_of_any_length_may_come_before_a_demanded_call(
    server: DialectServer, text: str, thought: str | None, choice: Any
) -> None:
    reply = await server.ok(CHAT, body(text, tools=[TOOL], tool_choice=choice))
    message = reply["choices"][0]["message"]
    assert called(message) == ["look"]
    assert message.get("reasoning_content") == thought


@pytest.mark.parametrize(
    "held",
    [{"response_format": SCHEMA}, {"response_format": {"type": "json_object"}},
     {"structured_outputs": {"regex": r"\{.*\}"}},
     {"structured_outputs": {"choice": ['{"word": "sea"}', "none"]}},
     {"response_format": SCHEMA, "tools": [TOOL]}],
)  # fmt: skip
async def test_thinking_precedes_a_schema_or_another_grammar(
    server: DialectServer, held: dict[str, Any]
) -> None:
    reply = await server.ok(CHAT, body("think, then answer", **held))
    message = reply["choices"][0]["message"]
    assert message["reasoning_content"] == THOUGHT
    assert json.loads(message["content"]) == {"word": "sea"}
    refused = await server.post(CHAT, body("think, then talk", **held))
    assert "does not fit the grammar" in refused.json()["error"]["message"]


async def test_with_thinking_off_the_grammar_holds_from_the_first_token(
    server: DialectServer,
) -> None:
    demand = {"tools": [TOOL], "tool_choice": "required", **OFF}
    reply = await server.ok(CHAT, body("only call", **demand))
    assert called(reply["choices"][0]["message"]) == ["look"]
    refused = await server.post(CHAT, body("think, then call", **demand))
    assert "does not fit the grammar" in refused.json()["error"]["message"]


async def test_the_other_dialects_let_a_model_think_as_well(server: DialectServer) -> None:
    tool = {"name": "look", "input_schema": PARAMETERS}
    message = await server.ok(
        "/v1/messages", body("think, then call", tools=[tool], tool_choice={"type": "any"})
    )
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]
    function = {"type": "function", "name": "look", "parameters": PARAMETERS}
    response = await server.ok(
        "/v1/responses",
        {"model": "tiny", "input": "think, then call", "tools": [function],
         "tool_choice": "required"},
    )  # fmt: skip
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]


async def test_a_session_of_thoughts_and_demanded_calls_is_exact(server: DialectServer) -> None:
    demand: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    first = body("think, then call", **demand)
    header = {"X-Session-ID": "thinks"}
    reply = await server.ok(CHAT, first, **header)
    message = reply["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
    more = [message, result, {"role": "user", "content": "only call"}]
    await server.ok(CHAT, {**first, "messages": [*first["messages"], *more]}, **header)
    (sample,) = await server.samples("thinks")
    grammars = {span.shaping.grammar for span in sample.shaping}
    assert [grammar.has_thought for grammar in grammars if grammar] == [True]
    assert sample.breaks == ()
