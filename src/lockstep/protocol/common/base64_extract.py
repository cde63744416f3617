"""Takes the base64 of routed experts out of a JSON body before anybody decodes the JSON.

Megabytes of base64 would otherwise be copied, checked as UTF-8 and made into a str. The scanner
only trusts what valid JSON guarantees: an unescaped quote opens or closes a string, so the bytes
`"routed_experts"` with an unescaped first quote are that whole string, never a part of another;
followed by a colon, it is a key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Body = bytes | bytearray
KEY = b'"routed_experts"'
NEEDLE = b"routed_experts"
"""Searched for without its quotes: JSON is full of quotes, and the search skips on rare bytes."""
SPACE = b" \t\r\n"
STRUCTURE = re.compile(rb'["{}\[\]]')
MARK = ":"
"""Starts the text that stands where a value was; base64 has no colon, so the two never mix up."""


@dataclass(frozen=True, slots=True)
class Base64Text:
    """Base64 as it came, in one piece or in several."""

    parts: tuple[memoryview, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)

    def start(self, size: int) -> bytes:
        return b"".join(part[:size] for part in self.parts)[:size]

    def end(self, size: int) -> bytes:
        return b"".join(part[-size:] for part in self.parts)[-size:]

    def whole(self) -> memoryview | bytes:
        return self.parts[0] if len(self.parts) == 1 else bytes(self)


@dataclass(frozen=True, slots=True)
class ExtractedBody:
    """`json` is the body with each value replaced by `":0"`, `":1"`...; `values` are the bytes."""

    json: Body
    values: tuple[Base64Text, ...]

    def text(self, field: str) -> Base64Text:
        """The base64 behind a decoded field: the bytes that were taken out, or the field itself."""
        if field.startswith(MARK) and field[1:].isdigit() and int(field[1:]) < len(self.values):
            return self.values[int(field[1:])]
        return Base64Text((memoryview(field.encode()),))


def extract_base64(body: Body | ExtractedBody, most: int = 1) -> ExtractedBody:
    """The body without the base64 of its routed experts. Never raises: bad JSON stays as it is.

    The search ends after `most` keys, so that it need not read all of an answer that has no more;
    a value it did not reach is still right, only decoded with the rest.
    """
    if isinstance(body, ExtractedBody):
        return body
    spans = find_values(body, most)
    if not spans:
        return ExtractedBody(body, ())
    view = memoryview(body)
    pieces: list[memoryview | bytes] = []
    at = 0
    for number, (start, end) in enumerate(spans):
        pieces += (view[at:start], f"{MARK}{number}".encode())
        at = end
    pieces.append(view[at:])
    values = tuple(Base64Text((view[start:end],)) for start, end in spans)
    return ExtractedBody(b"".join(pieces), values)


def find_values(body: Body, most: int) -> list[tuple[int, int]]:
    """[start, end) of the base64 string under each `routed_experts` key, in document order."""
    spans: list[tuple[int, int]] = []
    at = keys = 0
    while keys < most and (found := body.find(NEEDLE, at) - 1) >= 0:
        at = found + 1 + len(NEEDLE)
        if body[found : found + len(KEY)] != KEY or body[found - 1 : found] == b"\\":
            continue
        at = found + len(KEY)
        colon = _skip_space(body, at)
        if body[colon : colon + 1] != b":":
            continue
        keys += 1
        value = _skip_space(body, colon + 1)
        opening = body[value : value + 1]
        if opening == b'"':
            span = _plain_string(body, value)
            at = value
        elif opening == b"{":
            span, at = _data_of_object(body, value)
        else:
            continue
        if span is not None:
            spans.append(span)
            at = span[1] + 1
    return spans


def _data_of_object(body: Body, brace: int) -> tuple[tuple[int, int] | None, int]:
    """The span of the string under the object's own "data" key, and where to go on searching."""
    depth = 0
    at = brace
    while (found := STRUCTURE.search(body, at)) is not None:
        at = found.end()
        if found[0] in (b"{", b"["):
            depth += 1
        elif found[0] in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return None, at
        else:
            end = _string_end(body, at)
            if end == -1:
                return None, len(body)
            key, at = body[found.start() : end + 1], end + 1
            colon = _skip_space(body, at)
            if depth == 1 and key == b'"data"' and body[colon : colon + 1] == b":":
                value = _skip_space(body, colon + 1)
                if body[value : value + 1] == b'"':
                    return _plain_string(body, value), value
    return None, len(body)


def _plain_string(body: Body, quote: int) -> tuple[int, int] | None:
    """The span inside the quotes, or None for a string with escapes: JSON must decode that one."""
    end = body.find(b'"', quote + 1)
    if end == -1 or body.find(b"\\", quote + 1, end) != -1:
        return None
    return quote + 1, end


def _string_end(body: Body, start: int) -> int:
    """Where the string whose content starts at `start` has its closing quote, or -1."""
    end = body.find(b'"', start)
    while end != -1:
        before = end - 1
        while before >= start and body[before] == ord("\\"):
            before -= 1
        if (end - before) % 2 == 1:
            return end
        end = body.find(b'"', end + 1)
    return -1


def _skip_space(body: Body, at: int) -> int:
    while at < len(body) and body[at] in SPACE:
        at += 1
    return at
