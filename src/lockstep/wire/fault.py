"""Errors on the wire, in the shape that OpenAI's and vLLM's clients read."""

from __future__ import annotations

from lockstep.tokens.errors import LockstepError

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


def fault(error: LockstepError, request_id: str | None = None) -> dict[str, object]:
    """The body {"error": {...}}: vLLM's four fields, and Lockstep's stable code as `reason`."""
    return fault_body(error.status, error.message, error.code, error.param, request_id)


def fault_body(
    status: int, message: str, reason: str, param: str | None = None, request_id: str | None = None
) -> dict[str, object]:
    return {
        "error": {
            "message": message,
            "type": TYPES.get(status, "InternalServerError"),
            "param": param,
            "code": status,
            "reason": reason,
            "request_id": request_id,
        }
    }
