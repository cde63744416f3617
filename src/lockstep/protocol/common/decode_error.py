"""Conversion of server errors in any dialect to Lockstep's typed errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.tokens import errors
from lockstep.tokens.errors import LockstepError
from lockstep.tokens.operation import Operation

BY_STATUS: dict[int, type[LockstepError]] = {
    400: errors.BadRequest,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.UnknownModel,
    405: errors.NotFound,
    408: errors.DeadlineExceeded,
    409: errors.Conflict,
    413: errors.BadRequest,
    422: errors.BadRequest,
    429: errors.Busy,
    500: errors.EngineFailure,
    501: errors.UnsupportedField,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.DeadlineExceeded,
}
NO_ROUTE = re.compile(
    r"^(?:not found|route .*not found|no route)\b|^Route not found", re.IGNORECASE
)
TOO_LONG = re.compile(
    r"longer than the maximum model length|maximum context length|longer than the model's context"
)
BAD_ID = re.compile(r"[Tt]oken id \S+ is out of vocabulary|token_ids must not contain negative")
PAGE = re.compile("<!doctype html|<html", re.IGNORECASE)
TITLE = re.compile("<title>([^<]{1,80})", re.IGNORECASE)
SHOWN = 500
DYNAMO_ERROR = {"message", "type", "code"}
NO_ERROR = msgspec.Raw()
"""Value of the `error` field of a response without an error."""


def error_of(status: int, body: bytes | bytearray) -> LockstepError:
    """Return the typed error for an HTTP response with `status`, with the server's own message.

    An error written by a Lockstep server (`error_body`) becomes the same class with the same
    fields.
    """
    whole = _object(body)
    fields = _fields(whole)
    message = _message(fields, body, status)
    if (stated := stated_error(fields, message, whole.get("operation"))) is not None:
        return stated
    kind = errors.Unavailable if _is_frontends_own(whole) else _kind(status, message)
    return kind(message, param=_text(fields, "param"))


def _is_frontends_own(whole: Mapping[str, Any]) -> bool:
    """Return whether a Dynamo frontend itself failed, for example because the link to its workers
    broke; it words errors of an engine differently.
    """
    if whole.get("code") != 500 or not DYNAMO_ERROR <= whole.keys() <= DYNAMO_ERROR | {"details"}:
        return False
    details = whole.get("details")
    return not (isinstance(details, dict) and "backend_status" in details)


def stated_error(
    fields: Mapping[str, Any], message: str, operation: object = None
) -> LockstepError | None:
    """Return the error whose code is `reason`, with its fields; None for an unknown code."""
    kind = errors.BY_CODE.get(str(fields.get("reason")))
    if kind is None:
        return None
    own = {name: text for name in kind.fields if (text := _text(fields, name)) is not None}
    if len(own) < len(kind.fields):
        return None  # incomplete fields: use the status instead
    after = fields.get("retry_after")
    return kind(
        message,
        param=_text(fields, "param"),
        retry_after=float(after) if isinstance(after, int | float) else None,
        operation=_operation(operation),
        **own,
    )


def _operation(record: object) -> Operation | None:
    try:
        return None if record is None else msgspec.convert(record, Operation)
    except msgspec.ValidationError:
        return None  # of another release; the error itself is still correct


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) else None


def raise_stated(error: msgspec.Raw) -> None:
    """Raise the error stated in a response or event with HTTP status 200, if there is one."""
    body = bytes(error)
    if body in (b"", b"null"):
        return
    code = _fields(_object(body)).get("code")
    raise error_of(int(code) if code and str(code).isdigit() else 500, body)


def _kind(status: int, message: str) -> type[LockstepError]:
    if status in (400, 413, 422):
        if TOO_LONG.search(message):
            return errors.PromptTooLong
        if BAD_ID.search(message):
            return errors.BadTokenId
    if status == 404 and NO_ROUTE.search(message):
        return errors.NotFound
    if status in BY_STATUS:
        return BY_STATUS[status]
    return errors.BadRequest if 400 <= status < 500 else errors.EngineFailure


def _object(body: bytes | bytearray) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _fields(whole: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of {"error": {...}} (vLLM, SGLang, Lockstep) or of the flat form
    (Dynamo).
    """
    inner = whole.get("error")
    return inner if isinstance(inner, dict) else whole


def _message(fields: dict[str, Any], body: bytes | bytearray, status: int) -> str:
    for name in ("message", "detail", "error"):
        if fields.get(name):
            value = fields[name]
            return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = bytes(body[:SHOWN]).decode("utf-8", "replace").strip()
    if PAGE.match(text):
        title = TITLE.search(text)
        named = f" {title[1].strip()!r}" if title else ""
        return f"the server answered {status} with a page of HTML{named}: it is no server of models"
    if text:
        return f"the server answered {status}: {text}"
    if status == 404:
        return "the server answered 404 with an empty body: no model is registered there yet"
    return f"the server answered {status} with an empty body"
