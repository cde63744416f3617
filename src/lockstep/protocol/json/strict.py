"""Strict decoding of JSON bodies, and the limits of what a body may hold.

Errors name the field, the value and the expected type. Limits bound the time and memory that one
request costs a process, whatever its sender: a body beyond them is rejected before any work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy as np

from lockstep.tokens.errors import BadRequest, TooLarge, UnknownField, UnsupportedField

T = TypeVar("T")
PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
TOKEN_ID = re.compile(r"[0-9]{1,18}")
MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
PIECE = 1 << 18
"""Bytes scanned at once: other threads may run between two pieces."""
COUNTED = (
    ("messages", "messages"),
    ("input", "messages"),
    ("tools", "tools"),
    ("prompt", "prompts"),
    ("stop_token_ids", "stop_token_ids"),
    ("logit_bias", "logit_bias"),
    ("allowed_token_ids", "allowed_token_ids"),
    ("required_prefix_token_ids", "required_prefix_token_ids"),
    ("stop", "stop_token_ids"),
    ("stop_sequences", "stop_token_ids"),
    ("bad_words", "stop_token_ids"),
    ("logprob_token_ids", "stop_token_ids"),
    ("guided_choice", "choice"),
    ("choice", "choice"),
    ("request_ids", "request_ids"),
)
"""Fields of a body, in any dialect, and the limit on their number of entries."""
ID_LISTS = ("allowed_token_ids", "required_prefix_token_ids")
"""Lists that are counted before a large body is decoded; their limits have the same names."""
NESTED = ("messages", "input", "tools", "tool_choice", "chat_template_kwargs", "metadata")
"""Fields whose values may be any JSON."""
NESTING = frozenset({list, dict})


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode the body. Raises BadRequest (or UnknownField) that names the error and its
    position.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain(str(error), body) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}", param="body") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: {error}", param="body") from None
    except RecursionError:
        raise too_deep() from None


def explain(message: str, body: bytes) -> BadRequest:
    """Return the typed error for a msgspec validation message about `body`."""
    match = PATH.search(message)
    path = match["path"].removeprefix("$").removeprefix(".") if match else ""
    expected = PATH.sub("", message)
    if unknown := UNKNOWN.search(message):
        field = f"{path}.{unknown['name']}".lstrip(".")
        return UnknownField(
            f"unknown field {field!r}: remove it or check its spelling", param=field
        )
    if missing := MISSING.search(message):
        field = f"{path}.{missing['name']}".lstrip(".")
        return BadRequest(f"required field {field!r} is missing", param=field)
    try:
        excerpt = msgspec.json.encode(_at(msgspec.json.decode(body), path)).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The part that the typed decoder did not reach may be invalid JSON, or contain a number of
        # 5,000 digits: then no value can be quoted.
        where = path or "body"
        return BadRequest(f"{where} cannot be read: {expected} ({error})", param=where)
    excerpt = excerpt if len(excerpt) <= 80 else f"{excerpt[:77]}..."
    return BadRequest(f"{path or 'body'} is {excerpt}: {expected}", param=path or "body")


def _at(value: Any, path: str) -> Any:
    """Return the value at a msgspec path, as far as the path can be followed."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if index and isinstance(value, list):
            value = value[int(index)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
    return value


def refuse_unless_neutral(
    struct: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> None:
    """Raise UnsupportedField for the first field that is set to an unsupported value."""
    for field, allowed in neutral.items():
        value = getattr(struct, field)
        if value is not None and value not in allowed:
            options = ", ".join(["null", *(msgspec.json.encode(v).decode() for v in allowed)])
            raise UnsupportedField(
                f"{prefix}{field} is not supported by this engine: leave it out, or send {options}",
                param=prefix + field,
            )


def read_biases(raw: dict[str, float] | None, field: str = "logit_bias") -> dict[int, float] | None:
    """Return biases by token id. Raises BadRequest that names an invalid key."""
    if raw is None:
        return None
    for token in raw:
        if TOKEN_ID.fullmatch(token) is None:
            excerpt = token if len(token) <= 40 else f"{token[:37]}..."
            raise BadRequest(f"{field} has the key {excerpt!r}: keys are token ids", param=field)
    return {int(token): bias for token, bias in raw.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one request body. Each is an option: `--limit NAME=NUMBER`.

    body_bytes       size of the body
    values           objects, lists and strings
    items            comma-separated items, mostly token ids
    nesting          depth of objects and lists
    characters       length of a text for /tokenize
    messages, tools, prompts, stop_token_ids, logit_bias, allowed_token_ids, choice,
    required_prefix_token_ids, request_ids: number of entries
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
    allowed_token_ids: int = 65_536
    choice: int = 4096
    required_prefix_token_ids: int = 262_144
    request_ids: int = 20_000

    def check_id_lists(self, body: bytes, items: int) -> None:
        """Raise BadRequest for a body with too many ids in a list of token ids, without decoding.

        Decoding two million ids holds the interpreter for a tenth of a second. A body of fewer
        `items` than a list may have is not searched.
        """
        for field in ID_LISTS:
            most = getattr(self, field)
            if items < most:
                continue
            # Inside a JSON string the quotes are escaped: this matches keys only.
            for key in re.finditer(rb'"%s"\s*:\s*\[' % field.encode(), body):
                count = body.count(b",", key.end(), body.find(b"]", key.end())) + 1
                if count > most:
                    raise _too_many(field, count, field, most)

    def check(self, request: object) -> None:
        """Raise BadRequest for a decoded body with too many entries or too deep nesting."""
        for owner, prefix in _owners(request):
            for field, limit in _limited(type(owner))[0]:
                listed = getattr(owner, field)
                if not isinstance(listed, list | dict) or len(listed) <= getattr(self, limit):
                    continue
                # A `prompt` of integers is one prompt, not a list of prompts.
                if field != "prompt" or not isinstance(listed[0], int):
                    raise _too_many(prefix + field, len(listed), limit, getattr(self, limit))
        for field in _limited(type(request))[1]:
            value = getattr(request, field)
            if value and isinstance(value, list | dict) and depth(value, self.nesting) is None:
                raise too_deep(self.nesting, field)


def _too_many(field: str, count: int, limit: str, most: int) -> BadRequest:
    return BadRequest(
        f"{field} lists {count}: at most {most} are taken here (--limit {limit}=NUMBER)",
        param=field,
    )


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


def _owners(request: object) -> Iterator[tuple[object, str]]:
    """Yield the objects of a body that have fields of COUNTED, with the prefix of their names."""
    for owner, prefix in (
        (request, ""),
        (getattr(request, "sampling_params", None), "sampling_params."),
    ):
        yield owner, prefix
        if (outputs := getattr(owner, "structured_outputs", None)) is not None:
            yield outputs, f"{prefix}structured_outputs."


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
