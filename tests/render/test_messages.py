"""One history, written in any way, is one history; and an edit is an edit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from lockstep.render import canonical, canonical_tools, plain_messages, plain_tools, same
from lockstep.tokens.errors import BadRequest, UnsupportedField


class Function(BaseModel):
    name: str
    arguments: str


class Call(BaseModel):
    id: str | None = None
    type: str = "function"
    function: Function


class SdkMessage(BaseModel):
    role: str
    content: str | list[dict[str, str]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    refusal: str | None = None


ARGUMENTS = {"b": [1, 2.5, None], "a": "é"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": ARGUMENTS}}
    ],
}


def read(message: Any) -> Any:
    return canonical(plain_messages([message])[0])


def spellings() -> list[Any]:
    text = json.dumps(ARGUMENTS)
    call = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": text}}
    turned = json.dumps(dict(reversed(ARGUMENTS.items())), indent=2)
    return [
        CALLED,
        {**CALLED, "tool_calls": [call], "refusal": None, "audio": None, "function_call": None},
        {**CALLED, "content": [{"type": "text", "text": "Let me"}, {"text": " see."}]},
        {**CALLED, "tool_calls": [{"id": "c1", "name": "calc", "arguments": turned}]},
        SdkMessage(
            role="assistant",
            content="Let me see.",
            tool_calls=[Call(id="c1", function=Function(name="calc", arguments=text))],
        ),
        ChatCompletionMessage.model_validate({**CALLED, "tool_calls": [call]}),
        read(CALLED),
    ]


@pytest.mark.failure_mode("F01")
@pytest.mark.parametrize("at", range(7))
def test_every_spelling_of_a_message_is_one_message(at: int) -> None:
    assert read(spellings()[at]) == read(CALLED)


@pytest.mark.failure_mode("F01")
@pytest.mark.parametrize("at", [0, 1, 2, 4, 5])
def test_every_spelling_but_another_order_of_keys_renders_alike(at: int, renderer: Any) -> None:
    history = [{"role": "user", "content": "1?"}, spellings()[at], {"role": "tool", "content": "3"}]
    assert renderer.render(history) == renderer.render([history[0], CALLED, history[2]])


@pytest.mark.failure_mode("F01")
def test_absent_is_not_edited() -> None:
    stored = read({**CALLED, "reasoning_content": "Hm."})
    without_id = {**CALLED, "tool_calls": [{"function": CALLED["tool_calls"][0]["function"]}]}
    for sent in (CALLED, without_id, {**CALLED, "annotations": []}, {**CALLED, "refusal": ""}):
        assert same(stored, read(sent))
    assert same(stored, read({**CALLED, "reasoning": "Hm."}))


@pytest.mark.failure_mode("F02")
@pytest.mark.parametrize(
    "edit",
    [
        {"content": "Let me look."},
        {"reasoning_content": "Something else."},
        {"tool_calls": None},
        {"tool_calls": [{"id": "c1", "function": {"name": "calc", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "c2", "function": {"name": "calc", "arguments": ARGUMENTS}}]},
        {"role": "user"},
    ],
)
def test_an_edit_is_an_edit(edit: dict[str, Any]) -> None:
    stored = read({**CALLED, "reasoning_content": "Hm."})
    assert not same(stored, read({**CALLED, **edit}))


def test_an_added_key_changes_a_user_message_but_not_an_answer() -> None:
    user = {"role": "user", "content": "Hi"}
    assert not same(read(user), read({**user, "name": "Ann"}))
    assert same(read(CALLED), read({**CALLED, "provider": {"x": 1}}))


def test_tools_compare_by_meaning_and_keep_nulls_of_their_schema() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
    loose = {"function": {"strict": None, **tool["function"]}, "type": "function"}
    assert canonical_tools(plain_tools([tool])) == canonical_tools(plain_tools([loose]))
    assert plain_tools([loose]) == [tool]
    assert plain_tools([]) is None
    assert canonical_tools(None) == b""


@pytest.mark.parametrize(
    ("message", "error", "names"),
    [
        ({"role": "robot", "content": "x"}, BadRequest, "messages[0].role is 'robot'"),
        ({"content": "x"}, BadRequest, "messages[0].role is None"),
        ({"role": "user", "content": 3}, BadRequest, "messages[0].content is a int"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            UnsupportedField,
            "messages[0].content[0] is a part of type 'image_url'",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            BadRequest,
            "messages[0].tool_calls[0] has no function name",
        ),
        ("hello", BadRequest, "messages[0] is a str"),
    ],
)
def test_an_unreadable_message_is_named(message: Any, error: type[Exception], names: str) -> None:
    with pytest.raises(error) as caught:
        plain_messages([message])
    assert names in str(caught.value)


def test_no_messages_at_all_is_an_error() -> None:
    with pytest.raises(BadRequest, match="messages is empty"):
        plain_messages([])


def test_developer_is_system_under_its_new_name() -> None:
    assert read({"role": "developer", "content": "x"}) == read({"role": "system", "content": "x"})
