"""Parser of Mistral's tool calls: the marker [TOOL_CALLS], then one JSON list of calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from renderers.base import ParsedToolCall, ToolCallParseStatus

from lockstep.tokens.token_bytes import TokenBytesTable

MARK = "[TOOL_CALLS]"
_JSON = json.JSONDecoder()


class MistralToolParser:
    """Tool parser in the form that `renderers` expects: ids in, content ids and call attempts
    out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._mark = tokenizer.convert_tokens_to_ids(MARK)
        self._pieces = TokenBytesTable(tokenizer)

    def extract(self, ids: list[int]) -> tuple[list[int], list[ParsedToolCall]]:
        """Return the calls once their list is closed; until then there is one open attempt."""
        if self._mark not in ids:
            return ids, []
        start = ids.index(self._mark)
        pieces = [self._pieces.data(token) for token in ids[start + 1 :]]
        try:
            text = b"".join(pieces).decode()
            elements, end = _read_list(text)
        except (ValueError, RecursionError) as error:
            # The decoder reports where it stopped: at the end, more may follow; elsewhere it is not
            # JSON.
            raw = b"".join(pieces).decode(errors="replace")
            is_open = isinstance(error, json.JSONDecodeError) and (
                error.pos >= len(raw.rstrip()) or error.msg.startswith("Unterminated string")
            )
            status = (
                ToolCallParseStatus.UNCLOSED_BLOCK if is_open else ToolCallParseStatus.INVALID_JSON
            )
            attempt = ParsedToolCall(raw=raw, token_span=(start, len(ids)), status=status)
            return ids[:start], [attempt]
        ends = _token_ends(text, [*(at for _, at in elements[:-1]), end], pieces)
        calls, seen = [], set[str]()
        begin, read = start, 0
        for (value, at), token_end in zip(elements, ends, strict=True):
            span = (begin, start + 1 + token_end)
            calls.append(_call(value, text[read:at].lstrip("[, \n\t\r"), span, seen))
            begin, read = span[1], at
        return ids[:start], calls


def _read_list(text: str) -> tuple[list[tuple[Any, int]], int]:
    """Return the elements of the list at the start of a text, each with its end, and the list's
    end. Raises JSONDecodeError with the position of the error.
    """
    at = _expect(text, 0, "[")
    elements: list[tuple[Any, int]] = []
    while True:
        value, at = _JSON.raw_decode(text, _space(text, at))
        elements.append((value, at))
        at = _space(text, at)
        if text[at : at + 1] == "]":
            return elements, at + 1
        at = _expect(text, at, ",")


def _expect(text: str, at: int, mark: str) -> int:
    at = _space(text, at)
    if text[at : at + 1] != mark:
        raise json.JSONDecodeError(f"expected {mark}", text, at)
    return at + 1


def _space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip()) if text[at:].strip() else len(text)


def _token_ends(text: str, ends: Sequence[int], pieces: Sequence[bytes]) -> list[int]:
    """Return how many tokens are complete at each character position."""
    sizes = list(accumulate(map(len, pieces)))
    counts = []
    for end in ends:
        reached = len(text[:end].encode())
        counts.append(next(at for at, size in enumerate(sizes, 1) if size >= reached))
    return counts


def _call(value: Any, raw: str, span: tuple[int, int], seen: set[str]) -> ParsedToolCall:
    if not isinstance(value, dict):
        status = ToolCallParseStatus.MALFORMED_STRUCTURE
        return ParsedToolCall(raw=raw, token_span=span, status=status)
    # The model numbers its calls itself, and results refer to the number. A duplicate is dropped.
    number = value.get("id")
    if not isinstance(number, str) or not number or number in seen:
        number = None
    else:
        seen.add(number)
    return ParsedToolCall(
        raw=raw,
        name=value.get("name"),
        arguments=value.get("arguments", {}),
        token_span=span,
        id=number,
    )
