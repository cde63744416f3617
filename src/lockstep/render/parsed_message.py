"""A parsed completion: content, reasoning and tool calls, with a status for every call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from lockstep.render.messages import Plain
from lockstep.tokens import Finish


class CallStatus(StrEnum):
    """Whether a tool call can be executed, or the reason why not."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    UNCLOSED_BLOCK = "unclosed_block"
    MISSING_NAME = "missing_name"
    MALFORMED_STRUCTURE = "malformed_structure"
    UNKNOWN_TOOL = "unknown_tool"


WRONG = {
    CallStatus.INVALID_JSON: "the arguments of the call{named} are no JSON",
    CallStatus.UNCLOSED_BLOCK: "the call{named} was never closed",
    CallStatus.MISSING_NAME: "the call names no tool",
    CallStatus.MALFORMED_STRUCTURE: "the call{named} has not the form of one",
    CallStatus.UNKNOWN_TOOL: "there is no tool{named}",
}
MARKED = 64
"""Number of tokens before a call, and of the prompt, that its id is derived from."""
MARKUP = re.compile(r"(?:\s|<[^<>\s]{1,40}>)*")
"""Text between calls that only marks where they begin and end."""


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt at a tool call. `raw` is the model's text, `span` its tokens [start, end)."""

    status: CallStatus
    raw: str
    id: str
    name: str | None = None
    arguments: str | None = None
    span: tuple[int, int] | None = None

    @property
    def ok(self) -> bool:
        return self.status is CallStatus.OK


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A parsed completion. `reasoning_complete` is None if the format cannot tell."""

    content: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    reasoning_complete: bool | None = True

    @property
    def tool_calls(self) -> tuple[Call, ...]:
        """The calls that can be executed."""
        return tuple(call for call in self.calls if call.ok)

    def finish(self, finish: Finish) -> Finish:
        """Return `tool_calls` instead of `stop` if a call was parsed; other reasons are
        unchanged.
        """
        return "tool_calls" if finish == "stop" and self.tool_calls else finish

    @property
    def tool_parse_error(self) -> str | None:
        """Error of the first call that cannot be executed; None if all can.

        The text of such a call stays in the content, verbatim.
        """
        failed = next((call for call in self.calls if not call.ok), None)
        if failed is None:
            return None
        named = f" {failed.name!r}" if failed.name else ""
        return f"{failed.status.value}: {WRONG[failed.status].format(named=named)}"

    def message(self) -> Plain:
        """Return the assistant message to send and to store."""
        message: Plain = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


def parse_message(
    parsed: Any, token_ids: Sequence[int], tools: list[Plain] | None, prompt_ids: Sequence[int]
) -> ParsedMessage:
    """Build the message from the output of a `renderers` parser."""
    names = {_name_of(tool) for tool in tools or ()}
    calls = []
    for at, attempt in enumerate(parsed.tool_calls or ()):
        arguments = attempt.arguments
        if arguments is not None and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        status = _judge(CallStatus(attempt.status.value), attempt.name, arguments, names)
        calls.append(
            Call(
                status=status,
                raw=attempt.raw,
                id=attempt.id or _call_id(at, token_ids, prompt_ids, attempt.token_span),
                name=attempt.name if isinstance(attempt.name, str) else None,
                arguments=arguments,
                span=attempt.token_span,
            )
        )
    return ParsedMessage(
        content=parsed.content or "",
        reasoning=parsed.reasoning_content or None,
        calls=tuple(calls),
        reasoning_complete=parsed.reasoning_complete,
    )


def not_offered(call: Call) -> Call:
    """Return the call with the status it has without tools: text."""
    return replace(call, status=CallStatus.UNKNOWN_TOOL)


def keep_unparsed(
    message: ParsedMessage, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> ParsedMessage:
    """Return the message with all text in its content that is not part of a parsed call.

    `token_ids` are the ids the message was parsed from. The parsers of the formats stop reading
    content at the first attempt of a call and would lose the text after it.
    """
    spans = [call.span for call in message.calls if call.span is not None]
    if len(spans) < len(message.calls):
        failed = (call.raw for call in message.calls if not call.ok)
        return replace(message, content="\n".join(filter(None, (message.content, *failed))))
    at = min(start for start, _ in spans)
    before = decode(token_ids[:at])
    parts = [before[len(before.rstrip()) :]]
    for call in sorted(message.calls, key=lambda call: call.span or (0, 0)):
        start, end = call.span or (at, at)
        parts.append(decode(token_ids[at:start]))
        parts.append("" if call.ok else decode(token_ids[start:end]))
        at = end
    rest = "".join((*parts, decode(token_ids[at:])))
    if message.tool_parse_error is None and MARKUP.fullmatch(rest):
        return message
    return replace(message, content=f"{message.content.rstrip()}{rest}")


def unparsed_message(text: str, prompt_ids: Sequence[int]) -> ParsedMessage:
    """Return the message for a parser failure: all of it is one call that is not JSON."""
    return ParsedMessage(
        "", calls=(Call(CallStatus.INVALID_JSON, text, _call_id(0, (), prompt_ids)),)
    )


def _judge(
    status: CallStatus, name: str | None, arguments: str | None, names: set[str]
) -> CallStatus:
    """Tighten the parser's status: parsers differ in what they accept."""
    if status is not CallStatus.OK:
        return status
    if not isinstance(name, str) or not name:
        return CallStatus.MISSING_NAME
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return CallStatus.INVALID_JSON
    if not isinstance(read, dict):
        return CallStatus.MALFORMED_STRUCTURE
    return CallStatus.UNKNOWN_TOOL if names and name not in names else CallStatus.OK


def _name_of(tool: Plain) -> str:
    return str(tool.get("function", tool).get("name", ""))


def _call_id(
    at: int,
    token_ids: Sequence[int],
    prompt_ids: Sequence[int],
    span: tuple[int, int] | None = None,
) -> str:
    """Return an id that is the same each time this turn is parsed, complete or streamed.

    It is derived from the prompt, which differs from turn to turn, and from the tokens sampled
    before the call, which differ between attempts at one prompt. It therefore identifies the turn:
    even a client that omits the thinking says which of two equal calls it continued from.
    """
    start = 0 if span is None else span[0]
    before = (start, list(token_ids[max(0, start - MARKED) : start]))
    before_turn = list(prompt_ids[-MARKED:]) if prompt_ids else list(token_ids)
    basis = repr((at, len(prompt_ids), before_turn, before))
    return "call_" + blake2b(basis.encode(), digest_size=12).hexdigest()
