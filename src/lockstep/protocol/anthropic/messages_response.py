"""Anthropic's messages dialect: responses, whole and as events, and errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lockstep.tokens.errors import LockstepError, ThreadNotFound

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
Fields = dict[str, Any]
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts of a request; nothing is billed, so nothing counts as cached."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """The whole response, or, without content, the opening of a stream."""

    id: str
    model: str
    content: list[Fields]
    usage: MessagesUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


class TokenCount(msgspec.Struct, kw_only=True):
    """Number of tokens of a prompt."""

    input_tokens: int


def thinking_block(text: str, signature: str) -> Fields:
    return {"type": "thinking", "thinking": text, "signature": signature}


def text_block(text: str) -> Fields:
    return {"type": "text", "text": text}


def tool_use_block(call_id: str, name: str, arguments: Any) -> Fields:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def event(name: str, **fields: Any) -> bytes:
    """Return one named event; its data repeats the name as `type`."""
    data = msgspec.json.encode({"type": name, **fields})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def error_of(error: LockstepError, request_id: str | None) -> Fields:
    """Return an error in Anthropic's shape, with our own code as `reason`."""
    kind = ERROR_TYPES.get(error.status, "api_error")
    body: Fields = {"type": kind, "message": error.message, "reason": error.code}
    if isinstance(error, ThreadNotFound):
        body["details"] = {"error_code": error.code}  # on which Anthropic's SDK sends the history
    return {
        "type": "error",
        "error": body,
        "request_id": request_id,
    }
