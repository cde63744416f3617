"""Extraction of routed experts' base64 from a JSON body before the JSON is decoded.

Megabytes of base64 would otherwise be copied, checked as UTF-8 and converted to a str.
`extract_base64` handles a complete body, `Base64Extractor` one that is still arriving. Values that
are not recognised stay in the JSON and are decoded with it: slower, but equally correct.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Body = bytes | bytearray
KEY = b'"routed_experts"'
NEEDLE = b"routed_experts"
"""Key to search for, without quotes: JSON is full of quotes, and the search skips on rare bytes."""
SPACE = b" \t\r\n"
STRUCTURE = re.compile(rb'["{}\[\]]')
MARK = ":"
"""Prefix of the text that replaces a value; base64 has no colon, so the two never mix up."""
LOOK_BACK = 4096
"""Maximum distance of the key before new bytes: its object contains only a shape and a dtype."""
OPEN = re.compile(
    rb'"routed_experts"\s*:\s*'
    rb'(?:\{(?:[^"{}\[\]]|"[^"\\]*"|\[[^\[\]"]*\])*?"data"\s*:\s*)?'
    rb'"([A-Za-z0-9+/=]*)\Z'
)
"""A body that ends inside the base64 of a `routed_experts` value."""


@dataclass(frozen=True, slots=True)
class Base64Text:
    """Base64 as received, in one piece or several."""

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
    """Result: `json` is the body with each value replaced by `":0"`, `":1"`...; `values` the
    bytes.
    """

    json: Body
    values: tuple[Base64Text, ...]

    def text(self, field: str) -> Base64Text:
        """Return the base64 of a decoded field: the extracted bytes, or the field itself."""
        if field.startswith(MARK) and field[1:].isdigit() and int(field[1:]) < len(self.values):
            return self.values[int(field[1:])]
        return Base64Text((memoryview(field.encode()),))


def extract_base64(body: Body | ExtractedBody, most: int = 1) -> ExtractedBody:
    """Return the body without the base64 of its routed experts. Never raises: bad JSON is
    unchanged.

    The search ends after `most` keys, so that it does not read the rest of a body without more
    keys; a value it did not reach is still correct, only decoded with the rest.
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


class Base64Extractor:
    """`extract_base64` for a body that arrives in chunks: large values are never joined.

    A base64 string longer than one chunk stays in its chunks.
    """

    def __init__(self) -> None:
        self._json = bytearray()
        self._values: list[Base64Text] = []
        self._open: list[bytes] | None = None

    def feed(self, chunk: bytes) -> None:
        if self._open is None:
            before = len(self._json)
            self._json += chunk
            self._look(max(before - LOOK_BACK, 0))
            return
        end = chunk.find(b'"')
        if chunk.find(b"\\", 0, len(chunk) if end == -1 else end) != -1:
            self._restore()
            self._json += chunk
        elif end == -1:
            self._open.append(chunk)
        else:
            self._open.append(chunk[:end])
            self._json += f"{MARK}{len(self._values)}".encode()
            self._values.append(Base64Text(tuple(map(memoryview, self._open))))
            self._open = None
            self.feed(chunk[end:])

    def finish(self) -> ExtractedBody:
        self._restore()
        return ExtractedBody(self._json, tuple(self._values))

    def _look(self, start: int) -> None:
        """Start a value if the JSON so far ends inside one."""
        at = self._json.rfind(NEEDLE, start) - 1
        if at < 0 or self._json[at - 1 : at] == b"\\" or self._json[at : at + len(KEY)] != KEY:
            return
        if (match := OPEN.match(self._json, at)) is not None:
            text = match.start(1)
            del match  # it references the buffer, which could not shrink
            self._open = [bytes(self._json[text:])]
            del self._json[text:]

    def _restore(self) -> None:
        """Put an unfinished value back into the JSON: it was cut off, or is not plain base64."""
        for piece in self._open or ():
            self._json += piece
        self._open = None


def find_values(body: Body, most: int) -> list[tuple[int, int]]:
    """Return [start, end) of the base64 string under each `routed_experts` key, in document
    order.
    """
    # Rely only on what valid JSON guarantees: an unescaped quote opens or closes a string, so the
    # needle after an unescaped quote is that whole string; followed by a colon, it is a key.
    spans: list[tuple[int, int]] = []
    at = keys = 0
    while keys < most and (quote := body.find(NEEDLE, at) - 1) >= 0:
        at = quote + 1 + len(NEEDLE)
        if body[quote : quote + len(KEY)] != KEY or body[quote - 1 : quote] == b"\\":
            continue
        at = quote + len(KEY)
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
    """Return the span of the string under the object's own "data" key, and where to continue."""
    depth = 0
    at = brace
    while (match := STRUCTURE.search(body, at)) is not None:
        at = match.end()
        if match[0] in (b"{", b"["):
            depth += 1
        elif match[0] in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return None, at
        else:
            end = _string_end(body, at)
            if end == -1:
                return None, len(body)
            key, at = body[match.start() : end + 1], end + 1
            colon = _skip_space(body, at)
            if depth == 1 and key == b'"data"' and body[colon : colon + 1] == b":":
                value = _skip_space(body, colon + 1)
                if body[value : value + 1] == b'"':
                    return _plain_string(body, value), value
    return None, len(body)


def _plain_string(body: Body, quote: int) -> tuple[int, int] | None:
    """Return the span inside the quotes, or None for a string with escapes, which JSON must
    decode.
    """
    end = body.find(b'"', quote + 1)
    if end == -1 or body.find(b"\\", quote + 1, end) != -1:
        return None
    return quote + 1, end


def _string_end(body: Body, start: int) -> int:
    """Return the position of the closing quote of the string starting at `start`, or -1."""
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
