"""Items of a conversation in OpenAI's responses dialect, decoded strictly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec

from lockstep.protocol.json.strict import explain
from lockstep.tokens.errors import UnsupportedField

T = TypeVar("T")


class _Item(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", gc=False):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item, tag="message"):
    """A message; `phase` is a mark that Codex keeps on messages of the assistant."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    phase: str | None = None


class ReasoningItem(_Item, tag="reasoning"):
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(_Item, tag="function_call"):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    async_: Any = None
    caller: Any = None


class FunctionOutputItem(_Item, tag="function_call_output"):
    call_id: str
    output: str | list[dict[str, Any]]
    caller: Any = None


class CustomCallItem(_Item, tag="custom_tool_call"):
    """A call whose input is free text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None
    caller: Any = None


class CustomOutputItem(_Item, tag="custom_tool_call_output"):
    call_id: str
    output: str | list[dict[str, Any]]
    caller: Any = None


class AdditionalToolsItem(_Item, tag="additional_tools"):
    """Tools in the input instead of the field `tools`, as Codex sends them."""

    tools: list[dict[str, Any]]
    role: str | None = None


class AgentMessageItem(_Item, tag="agent_message"):
    """A message from one Codex agent to another."""

    author: str
    recipient: str
    content: list[dict[str, Any]]


ResponseItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | FunctionOutputItem
    | CustomCallItem
    | CustomOutputItem
    | AdditionalToolsItem
    | AgentMessageItem
)
KINDS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "additional_tools",
    "agent_message",
)
TEXT_KEYS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "encrypted_content": "encrypted_content",
}
"""Content parts that are text, with the key of their text."""


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool: a function, a custom one with free text, a namespace of them, or a hosted one."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = []
    external_web_access: bool | None = None
    defer_loading: bool | None = None


def read_items(items: Iterable[dict[str, Any]], where: str = "input") -> list[ResponseItem]:
    """Return the items; an item without a type is a message. Raises BadRequest that names the
    position, UnsupportedField for a type that is not supported.
    """
    typed = [item if "type" in item else {**item, "type": "message"} for item in items]
    for at, item in enumerate(typed):
        if item["type"] not in KINDS:
            place = f"{where}[{at}].type"
            raise UnsupportedField(
                f"{place} is {item['type']!r}: this server takes {', '.join(KINDS)}", param=place
            )
    try:
        # Convert the whole list at once: msgspec would inspect the types again for every item.
        return msgspec.convert(typed, list[ResponseItem])
    except msgspec.ValidationError:
        return [convert(item, ResponseItem, f"{where}[{at}]") for at, item in enumerate(typed)]


def read_tools(tools: Iterable[dict[str, Any]], where: str = "tools") -> list[ResponseTool]:
    """Return the tools. Raises BadRequest that names the position."""
    return [convert(tool, ResponseTool, f"{where}[{at}]") for at, tool in enumerate(tools)]


def convert(value: dict[str, Any], kind: Any, where: str) -> Any:
    """Return the value as `kind`. Raises BadRequest (or UnknownField) that names the invalid
    part.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = explain(str(error), msgspec.json.encode(value))
        problem = problem.with_message(f"{where}: {problem.message}")
        problem.param = f"{where}.{problem.param}"
        raise problem from None


def text_of(content: str | list[dict[str, Any]], at: int, field: str, joint: str = "\n") -> str:
    """Return the text of a content, string or parts, in that field of input[at].

    Raises UnsupportedField for any other part.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content:
        kind = part.get("type")
        key = TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        text = None if key is None else part.get(key)
        if not isinstance(text, str):
            place = f"input[{at}].{field}[{len(texts)}]"
            raise UnsupportedField(
                f"{place} is a part of type {kind!r}: only text can be rendered to tokens here",
                param=place,
            )
        texts.append(text)
    return joint.join(texts)
