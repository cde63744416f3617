"""Canonical form of messages, so that one history written in two ways compares equal.

A message arrives as a dict, a pydantic object of some SDK, or a Struct; with or without None-valued
keys; with text as a string or as a list of text parts; with tool arguments as JSON text or as a
dict. `plain_messages` reads all of these into dicts that a chat template can render, `canonical`
converts them to comparable values, and `same` compares these as a conversation requires.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lockstep.tokens.errors import BadRequest, UnsupportedField

Plain = dict[str, Any]
"""A message or tool in the form a chat template takes: a dict without None-valued keys."""

ROLES = ("system", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
_BARE = {"role", "content"}
_KNOWN = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"}


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """Comparable form of a call: arguments are JSON with sorted keys, or the original text."""

    name: str
    arguments: str
    id: str = ""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Comparable form of a message. `extra` contains unknown keys as sorted JSON."""

    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    extra: str = ""


def plain_messages(messages: Iterable[Any], read_before: Sequence[Plain] = ()) -> list[Plain]:
    """Return the messages as dicts to render; `read_before` were read already.

    Raises BadRequest that names the message and the field.
    """
    new = itertools.islice(messages, len(read_before), None)
    read = [
        *read_before,
        *(_plain(message, f"messages[{at}]") for at, message in enumerate(new, len(read_before))),
    ]
    if not read:
        raise BadRequest("messages is empty, expected at least one message", param="messages")
    return read


def plain_tools(tools: Iterable[Any] | None) -> list[Plain] | None:
    """Return the tools as dicts to render; None without tools.

    Schemas are not changed: a null inside `parameters` can be intended.
    """
    read: list[Plain] = []
    for at, tool in enumerate(tools or ()):
        spec = _without_none(_as_dict(tool, f"tools[{at}]"))
        if isinstance(function := spec.get("function"), Mapping):
            spec["function"] = _without_none(function)
        read.append(spec)
    return read or None


def canonical(message: Plain) -> Message:
    """Return the comparable form of a message read by `plain_messages`."""
    if message.keys() == _BARE:
        return Message(message["role"], message["content"])
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        calls.append(
            ToolCall(
                function["name"],
                _sorted_json(_whole_numbers(function["arguments"])),
                call.get("id", ""),
            )
        )
    extra = {key: value for key, value in message.items() if key not in _KNOWN}
    return Message(
        role=message["role"],
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or None,
        tool_calls=tuple(calls),
        tool_call_id=message.get("tool_call_id", ""),
        name=message.get("name", ""),
        extra=_sorted_json(extra) if extra else "",
    )


def canonical_tools(tools: list[Plain] | None) -> bytes:
    """Return the comparable form of the tools; empty without tools."""
    return _sorted_json(tools).encode() if tools else b""


def same(stored: Message, received: Message) -> bool:
    """Return whether `received` is `stored` sent back. Omissions are not edits.

    A client may omit from or add to an assistant turn, without having changed it: the reasoning,
    the ids of tool calls, whitespace around the text, and keys that are not part of the content.
    """
    if stored == received:
        return True
    if stored.role != "assistant" or received.role != "assistant":
        return False
    if stored.content.strip() != received.content.strip():
        return False
    if len(stored.tool_calls) != len(received.tool_calls):
        return False
    if (
        received.reasoning is not None
        and received.reasoning.strip() != (stored.reasoning or "").strip()
    ):
        return False
    return all(
        mine.name == theirs.name
        and mine.arguments == theirs.arguments
        and (not mine.id or not theirs.id or mine.id == theirs.id)
        for mine, theirs in zip(stored.tool_calls, received.tool_calls, strict=True)
    )


def joined(first: Message, second: Message) -> Message:
    """Return two replies as one, as dialects join the parts of a turn."""
    return Message(
        role=first.role,
        content="\n".join(filter(None, (first.content, second.content))),
        reasoning="\n".join(filter(None, (first.reasoning, second.reasoning))) or None,
        tool_calls=(*first.tool_calls, *second.tool_calls),
    )


def starts_with(messages: Sequence[Message], stored: Sequence[Message], at: int = 0) -> bool:
    """Return whether the messages from `at` on begin with the stored ones."""
    part = messages[at : at + len(stored)]
    if part == stored:
        return True
    if len(part) != len(stored):
        return False
    return all(map(same, stored, part)) or all(map(same, _by_call(stored), _by_call(part)))


def _by_call(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with results of parallel calls sorted by their ids: clients send them in
    order of arrival, which may change the next time.
    """
    ordered: list[Message] = []
    for role, group in itertools.groupby(messages, lambda message: message.role):
        run = list(group)
        ordered += sorted(run, key=lambda result: result.tool_call_id) if role == "tool" else run
    return ordered


def leading_system(messages: Sequence[Plain]) -> list[Plain]:
    """Return the system messages that open a conversation."""
    return list(itertools.takewhile(lambda message: message["role"] == "system", messages))


def has_assistant(messages: Sequence[Message]) -> bool:
    return any(message.role == "assistant" for message in messages)


def _plain(message: Any, where: str) -> Plain:
    # Fast path: most messages of a long history have this form, and the history is sent every turn.
    if type(message) is dict and message.keys() == _BARE and message["role"] in ROLES:
        bare: Plain = message
        if type(bare["content"]) is str:
            return bare
    fields = _without_none(_as_dict(message, where))
    role = fields.get("role")
    # OpenAI renamed `system`; templates that do not know the new name would drop the message.
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise BadRequest(
            f"{where}.role is {role!r}, expected one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    fields["role"] = role
    # Servers use either spelling.
    reasoning = fields.pop("reasoning", None)
    if isinstance(reasoning, str):
        fields.setdefault("reasoning_content", reasoning)
    if "content" in fields:
        fields["content"] = _text(fields["content"], f"{where}.content")
    calls = fields.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list | tuple):
        raise BadRequest(
            f"{where}.tool_calls is {type(calls).__name__}: expected a list of calls",
            param=f"{where}.tool_calls",
        )
    if calls:
        fields["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)
        ]
    elif "content" not in fields:
        fields["content"] = ""
    return fields


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        kind = type(content).__name__
        raise BadRequest(f"{where} is a {kind}, expected text or text parts", param=where)
    parts: list[str] = []
    for at, part in enumerate(content):
        fields: Mapping[str, Any] = (
            {"type": "text", "text": part}
            if isinstance(part, str)
            else _as_dict(part, f"{where}[{at}]")
        )
        text = fields.get("text")
        if fields.get("type", "text") not in TEXT_PARTS or not isinstance(text, str):
            raise UnsupportedField(
                f"{where}[{at}] is a part of type {fields.get('type')!r}; only text can be "
                "rendered to tokens here",
                param=f"{where}[{at}]",
            )
        parts.append(text)
    return "".join(parts)


def _call(call: Any, where: str) -> Plain:
    fields = _without_none(_as_dict(call, where))
    function = _without_none(_as_dict(fields.get("function", fields), f"{where}.function"))
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where} has no function name", param=f"{where}.function.name")
    read: Plain = {
        "type": "function",
        "function": {"name": name, "arguments": _arguments(function.get("arguments", {}))},
    }
    if "id" in fields:
        read["id"] = str(fields["id"])
    return read


def _arguments(arguments: Any) -> Any:
    """Return arguments that are a JSON object as a dict, so that both spellings render alike."""
    if not isinstance(arguments, str):
        return arguments
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _whole_numbers(value: Any) -> Any:
    """Return the value with 5000.0 as 5000: JavaScript clients have one number type only."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value


def _sorted_json(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


def _as_dict(value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, Message):
        return _of_canonical(value)
    if isinstance(value, Mapping):
        return value
    if callable(dump := getattr(value, "model_dump", None)):
        dumped = dump()
        if isinstance(dumped, Mapping):
            return dumped
    if isinstance(value, msgspec.Struct) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        built = msgspec.to_builtins(value)
        if isinstance(built, Mapping):
            return built
    raise BadRequest(
        f"{where} is a {type(value).__name__}, expected a dict or a pydantic object", param=where
    )


def _of_canonical(message: Message) -> Plain:
    fields: Plain = json.loads(message.extra) if message.extra else {}
    fields |= {
        "role": message.role,
        "content": message.content,
        "reasoning_content": message.reasoning,
        "tool_call_id": message.tool_call_id or None,
        "name": message.name or None,
        "tool_calls": [
            {"id": call.id or None, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ],
    }
    return fields


def _without_none(fields: Mapping[str, Any]) -> Plain:
    return {key: value for key, value in fields.items() if value is not None}
