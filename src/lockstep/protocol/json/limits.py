"""Limits of a request body: sizes and counts beyond which it is rejected before any work.

They bound the time and memory that one request costs a process, whatever its sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from lockstep.tokens.errors import BadRequest, TooLarge

PIECE = 1 << 18
"""Bytes scanned at once: other threads may run between two pieces."""
COUNTED = (
    ("messages", "messages"),
    ("input", "messages"),
    ("tools", "tools"),
    ("prompt", "prompts"),
    ("stop_token_ids", "stop_token_ids"),
    ("logit_bias", "logit_bias"),
    ("request_ids", "request_ids"),
)
"""Fields of a body, in any dialect, and the limit on their number of entries."""
NESTED = ("messages", "input", "tools", "tool_choice", "chat_template_kwargs", "metadata")
"""Fields whose values may be any JSON."""
NESTING = frozenset({list, dict})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one request body. Each is an option: `--limit NAME=NUMBER`.

    body_bytes       size of the body
    values           objects, lists and strings
    items            comma-separated items, mostly token ids
    nesting          depth of objects and lists
    characters       length of a text for /tokenize
    messages, tools, prompts, stop_token_ids, logit_bias, request_ids: number of entries
    """

    body_bytes: int = 16 << 20
    values: int = 65_536
    items: int = 2_000_000
    nesting: int = 100
    characters: int = 1_000_000
    messages: int = 10_000
    tools: int = 1024
    prompts: int = 4096
    stop_token_ids: int = 1024
    logit_bias: int = 16_384
    request_ids: int = 20_000

    def check(self, request: object) -> None:
        """Raise BadRequest for a decoded body with too many entries or too deep nesting."""
        for owner, prefix in ((request, ""), (_inner(request), "sampling_params.")):
            for field, limit in _limited(type(owner))[0]:
                listed = getattr(owner, field)
                if not isinstance(listed, list | dict) or len(listed) <= getattr(self, limit):
                    continue
                # A `prompt` of integers is one prompt, not a list of prompts.
                if field != "prompt" or not isinstance(listed[0], int):
                    raise BadRequest(
                        f"{prefix}{field} lists {len(listed)}: at most {getattr(self, limit)} are "
                        f"taken here (--limit {limit}=NUMBER)",
                        param=prefix + field,
                    )
        for field in _limited(type(request))[1]:
            value = getattr(request, field)
            if value and isinstance(value, list | dict) and depth(value, self.nesting) is None:
                raise too_deep(self.nesting, field)


LIMITS = RequestLimits()
"""The default limits."""


Limited = tuple[tuple[tuple[str, str], ...], tuple[str, ...]]
_LIMITED: dict[type, Limited] = {}


def _limited(kind: type) -> Limited:
    """Return the fields of COUNTED and NESTED that bodies of this type have."""
    limited = _LIMITED.get(kind)
    if limited is None:
        fields = getattr(kind, "__struct_fields__", ())
        counted = tuple(pair for pair in COUNTED if pair[0] in fields)
        limited = _LIMITED[kind] = (counted, tuple(name for name in NESTED if name in fields))
    return limited


def _inner(request: object) -> object:
    return getattr(request, "sampling_params", None)


def too_deep(limit: int | None = None, param: str = "body") -> BadRequest:
    """Return the error for JSON that is nested too deeply."""
    how = "too deeply" if limit is None else f"more than {limit} levels deep"
    return BadRequest(f"{param} is nested {how}: flatten it", param=param)


def depth(value: Any, limit: int) -> int | None:
    """Return the nesting depth of decoded JSON; None beyond the limit."""
    level = [value]
    for at in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if type(item) is dict else item)
            if type(child) in NESTING
        ]
        if not level:
            return at + 1
    return None


def rough_values(piece: bytes) -> int:
    """Estimate the number of objects, lists and strings in JSON; quoted text counts too."""
    read = np.frombuffer(piece, np.uint8)  # counts five times as fast as bytes
    objects, lists, quotes = (np.count_nonzero(read == byte) for byte in b'{["')
    return int(objects + lists + quotes // 2)


class JsonShape:
    """Counter of JSON values that is fed in pieces, without decoding.

    For valid JSON the counts are exact; invalid JSON is rejected when it is decoded.
    """

    def __init__(self) -> None:
        self.values = self.items = 0
        self._in_string = False
        self._escape = b""

    def feed(self, piece: bytes) -> None:
        if self._escape:
            piece = self._escape + piece
        # An escaped quote does not end a string. Remove pairs of backslashes first, left to right.
        plain = piece.replace(rb"\\", b"")
        self._escape = b"\\" if plain.endswith(b"\\") else b""
        parts = plain.replace(rb"\"", b"").split(b'"')
        outside = b"".join(islice(parts, self._in_string, None, 2))
        strings = (len(parts) - self._in_string) // 2
        self.values += strings + outside.count(b"{") + outside.count(b"[")
        self.items += outside.count(b",")
        self._in_string ^= len(parts) % 2 == 0


def check_shape(pieces: Sequence[bytes], limits: RequestLimits) -> None:
    """Raise TooLarge for JSON beyond the limits. Runs in time proportional to the body."""
    shape = JsonShape()
    for piece in pieces:
        for start in range(0, len(piece), PIECE):
            shape.feed(piece[start : start + PIECE])
            for name, what in (("values", "objects, lists and strings"), ("items", "items")):
                if getattr(shape, name) > getattr(limits, name):
                    raise TooLarge(
                        f"the body holds more than {getattr(limits, name)} {what} "
                        f"(--limit {name}=NUMBER)",
                        param="body",
                    )
