"""Structured output over chat: schemas, demanded calls, one call at most; every token kept."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from lockstep.render import Renderer
from tests.gateway.chat.chat_server import SUM, TOOL, Served

OTHER = {
    "type": "function",
    "function": {
        "name": "shout",
        "parameters": {
            "type": "object",
            "properties": {"loud": {"type": "boolean"}},
            "required": ["loud"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


async def chosen(served: Served, **body: Any) -> dict[str, Any]:
    body = {"messages": SUM, "max_tokens": 500, "temperature": 1.0, "seed": 4} | body
    response = await served.post(**body)
    assert "choices" in response, response
    choice: dict[str, Any] = response["choices"][0]
    return choice


def name_of(call: dict[str, Any]) -> str:
    return str(call["function"]["name"])


@pytest.mark.failure_mode("F67")
async def test_a_schema_holds_and_logprobs_stay_complete(served: Served) -> None:
    choice = await chosen(served, response_format=FORMAT, logprobs=True, return_token_ids=True)
    assert choice["finish_reason"] == "stop"
    value = json.loads(choice["message"]["content"])
    assert 0 <= value["sum"] <= 99
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_any_object_will_do_for_json_object(served: Served) -> None:
    choice = await chosen(served, response_format={"type": "json_object"}, temperature=0.0)
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_is_made_against_the_model_s_preference(
    served: Served, stream: bool
) -> None:
    client = served.openai
    body: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400,
        "tools": [OTHER], "tool_choice": "required", "seed": 2,
    }  # fmt: skip
    if stream:
        async with client.chat.completions.stream(**body) as events:
            async for _ in events:
                pass
            completion: Any = await events.get_final_completion()
    else:
        completion = await client.chat.completions.create(**body)
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        assert call.function.name == "shout"
        assert isinstance(json.loads(call.function.arguments)["loud"], bool)


async def test_a_named_function_is_called_once_and_no_other(served: Served) -> None:
    named = {"type": "function", "function": {"name": "shout"}}
    for seed in range(4):
        choice = await chosen(served, tools=[TOOL, OTHER], tool_choice=named, seed=seed)
        assert [name_of(call) for call in choice["message"]["tool_calls"]] == ["shout"]


async def test_without_parallel_calls_there_is_at_most_one(served: Served) -> None:
    for seed in range(6):
        choice = await chosen(served, tools=[TOOL], parallel_tool_calls=False, seed=seed)
        assert len(choice["message"].get("tool_calls") or ()) <= 1


async def test_the_whitespace_of_arguments_can_be_set(served: Served) -> None:
    body: dict[str, Any] = {"tools": [OTHER], "tool_choice": "required", "return_token_ids": True}
    padded = {"whitespace_pattern": " {9}"}
    choice = await chosen(served, **body, structured_outputs=padded)
    text = Renderer.load("tiny").decode(choice["token_ids"])
    assert '"loud":' + " " * 9 in text
    compact = {"disable_any_whitespace": True}
    choice = await chosen(served, **body, structured_outputs=compact)
    text = Renderer.load("tiny").decode(choice["token_ids"])
    assert re.search(r'\{"loud":(true|false)\}', text)
    error = await served.refusal(messages=SUM, structured_outputs=compact)
    assert error["param"] == "structured_outputs"


async def test_none_leaves_calls_as_text(served: Served) -> None:
    choice = await chosen(served, tools=[TOOL], tool_choice="none")
    assert "tool_calls" not in choice["message"]


async def test_a_schema_beside_tools_applies_to_replies_without_a_call(served: Served) -> None:
    for seed in range(4):
        choice = await chosen(served, tools=[TOOL], response_format=FORMAT, seed=seed)
        if not choice["message"].get("tool_calls") and choice["finish_reason"] == "stop":
            assert "sum" in json.loads(choice["message"]["content"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}},
         "structured_outputs"),
    ],
)  # fmt: skip
async def test_unsupported_grammars_are_rejected_by_name(
    served: Served, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await served.openai.chat.completions.create(model="tiny", messages=SUM, **body)  # type: ignore[call-overload]
    assert refused.value.param == param


async def test_a_continued_message_cannot_have_a_schema(served: Served) -> None:
    begun = [*SUM, {"role": "assistant", "content": "The"}]
    error = await served.refusal(
        messages=begun, response_format=FORMAT, continue_final_message=True,
        add_generation_prompt=False,
    )  # fmt: skip
    assert error["param"] == "continue_final_message"


@pytest.mark.failure_mode("F67")
async def test_a_session_of_constrained_turns_is_exact_and_names_the_grammar(
    served: Served,
) -> None:
    messages: list[Any] = list(SUM)
    for turn in range(2):
        response = await served.post(
            messages=messages, tools=[OTHER], tool_choice="required", max_tokens=400, seed=turn,
            headers={"X-Session-ID": "held"},
        )  # fmt: skip
        message = response["choices"][0]["message"]
        messages += [message]
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
            for call in message["tool_calls"]
        ]
    (sample,) = await served.sessions.samples("held")
    assert len(sample.shaping) == 2
    grammars = {span.shaping.grammar for span in sample.shaping}
    assert {grammar.kind for grammar in grammars if grammar} == {"structural_tag"}
    assert sample.breaks == ()


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_called(served: Served, mode: str) -> None:
    """The model prefers the other tool, which stays in the prompt."""
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "shout"}}]}
    both: dict[str, Any] = {"tools": [TOOL, OTHER], "temperature": 0.0}
    free = await chosen(served, **both)
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    held = await chosen(served, **both, tool_choice=choice)
    assert name_of(free["message"]["tool_calls"][0]) == TOOL["function"]["name"]
    names = [name_of(call) for call in held["message"].get("tool_calls") or ()]
    assert set(names) <= {"shout"}
    assert names or mode == "auto"


async def test_a_wrong_list_of_allowed_tools_is_an_error_that_names_it(served: Served) -> None:
    for allowed, says in (
        ({"mode": "auto", "tools": []}, "send tool_choice 'none'"),
        ({"mode": "auto", "tools": [{"function": {"name": "sing"}}]}, "names 'sing'"),
        ({"mode": "maybe", "tools": []}, "expected mode"),
        (None, "expected mode"),
    ):
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        error = await served.refusal(messages=SUM, tools=[OTHER], tool_choice=choice)
        assert error["param"] == "tool_choice.allowed_tools"
        assert says in error["message"]
