"""Strict JSON decoding whose errors name the field, the value and the expected type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from lockstep.protocol.json.limits import too_deep
from lockstep.tokens.errors import BadRequest, UnknownField, UnsupportedField

T = TypeVar("T")
PATH = re.compile(r" - at `(?P<path>[^`]*)`$")
UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
TOKEN_ID = re.compile(r"[0-9]{1,18}")
MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")


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
