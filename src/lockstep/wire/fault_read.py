"""Errors that servers state, in the shape of any dialect, as the typed errors of Lockstep."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from lockstep.tokens import errors
from lockstep.tokens.errors import LockstepError

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
SHOWN = 500
NO_ERROR = msgspec.Raw()
"""What the `error` field of an answer holds when there is none."""


def _subclasses(base: type[LockstepError]) -> list[type[LockstepError]]:
    return [base] + [leaf for child in base.__subclasses__() for leaf in _subclasses(child)]


BY_REASON = {
    kind.code: kind for kind in _subclasses(LockstepError) if kind is not errors.PrefixBreak
}
"""Lockstep's own servers name the error exactly; a prefix break also needs its cause."""


def error_of(status: int, body: bytes | bytearray) -> LockstepError:
    """The typed error for an HTTP answer with `status`; keeps the server's own message."""
    fields = _fields(body)
    message = _message(fields, body, status)
    param = fields.get("param")
    kind = BY_REASON.get(str(fields.get("reason"))) or _kind(status, message)
    return kind(message, param=param if isinstance(param, str) else None)


def raise_stated(error: msgspec.Raw) -> None:
    """Raises the error that an answer or event with HTTP status 200 states, if it states one."""
    body = bytes(error)
    if body in (b"", b"null"):
        return
    code = _fields(body).get("code")
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


def _fields(body: bytes | bytearray) -> dict[str, Any]:
    """The fields of {"error": {...}} (vLLM, SGLang, Lockstep) or of the flat form (Dynamo)."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    if not isinstance(found, dict):
        return {}
    inner = found.get("error")
    if isinstance(inner, dict):
        return inner
    return found


def _message(fields: dict[str, Any], body: bytes | bytearray, status: int) -> str:
    for name in ("message", "detail", "error"):
        if fields.get(name):
            value = fields[name]
            return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = bytes(body[:SHOWN]).decode("utf-8", "replace").strip()
    if text:
        return f"the server answered {status}: {text}"
    if status == 404:
        return "the server answered 404 with an empty body: no model is registered there yet"
    return f"the server answered {status} with an empty body"
