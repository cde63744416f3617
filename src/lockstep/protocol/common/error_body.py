"""Error bodies in the shape that OpenAI's and vLLM's clients read."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from lockstep.tokens.errors import LockstepError, shorten

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


CODES = {
    "prompt_too_long": "context_length_exceeded",
    "unknown_model": "model_not_found",
    "unauthorized": "invalid_api_key",
    "busy": "rate_limit_exceeded",
}
"""OpenAI's codes that clients match, by our reason; all other errors have their status as code, as
in vLLM.
"""


PARAM = 256
"""Maximum length of a field name, which may quote the client's input."""


def error_fields(error: LockstepError, request_id: str | None = None) -> dict[str, object]:
    """Return the body {"error": {...}}: vLLM's four fields, and our stable code as `reason`.

    `code` is OpenAI's where clients match it (`CODES`), else the status. `retry_after` and the
    fields of the error's class are added if set; the record of a failed operation is beside
    `error`.
    """
    more: dict[str, object] = {name: getattr(error, name) for name in error.fields}
    if error.retry_after is not None:
        more["retry_after"] = error.retry_after
    body = error_body(error.status, error.message, error.code, error.param, request_id, more)
    if error.operation is not None:
        body["operation"] = msgspec.to_builtins(error.operation)
    return body


def error_body(
    status: int,
    message: str,
    reason: str,
    param: str | None = None,
    request_id: str | None = None,
    more: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the body {"error": {...}} from its parts; `more` are additional fields."""
    return {
        "error": {
            "message": shorten(message),
            "type": TYPES.get(status, "InternalServerError"),
            "param": None if param is None else shorten(param, PARAM),
            "code": CODES.get(reason, status),
            "reason": reason,
            "request_id": request_id,
            **(more or {}),
        }
    }
