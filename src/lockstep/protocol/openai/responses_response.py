"""OpenAI's responses dialect: the response object, its output items, and events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lockstep.protocol.common.error_body import CODES
from lockstep.tokens.errors import LockstepError

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Fields = dict[str, Any]


class ResponsesUsage(msgspec.Struct, kw_only=True):
    """Tokens of a response; the detail objects are always present, because SDKs read them."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]

    @classmethod
    def of(cls, input_tokens: int, output_tokens: int) -> ResponsesUsage:
        return cls(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            total_tokens=input_tokens + output_tokens,
            input_tokens_details={"cached_tokens": 0},
            output_tokens_details={"reasoning_tokens": 0},
        )


class ResponseObject(msgspec.Struct, kw_only=True):
    """The whole response; in a stream also its state so far. Some fields echo the request."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[Fields]
    usage: ResponsesUsage | None = None
    error: Fields | None = None
    incomplete_details: Fields | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Fields] = []
    tool_choice: Any = "auto"
    store: bool = True
    parallel_tool_calls: bool = True
    reasoning: Fields = {}
    text: Fields = {}
    metadata: Fields = {}
    truncation: str = "disabled"
    user: str | None = None
    object: str = "response"


class InputTokens(msgspec.Struct, kw_only=True):
    """Number of prompt tokens of a request."""

    input_tokens: int
    object: str = "response.input_tokens"


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Confirmation that a response was deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


def reasoning_item(item_id: str, text: str, sealed: str) -> Fields:
    """Return a reasoning item; its summary is the thinking itself."""
    summary = [{"type": "summary_text", "text": text}] if text else []
    return {"id": item_id, "type": "reasoning", "summary": summary, "encrypted_content": sealed}


def message_item(item_id: str, text: str | None) -> Fields:
    """Return an output message; without text, one in progress."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "in_progress" if text is None else "completed",
        "content": [] if text is None else [text_part(text)],
    }


def text_part(text: str) -> Fields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def event(name: str, number: int, /, **fields: Any) -> bytes:
    """Return one named event; its data repeats the name as `type`."""
    data = msgspec.json.encode({"type": name, "sequence_number": number, **fields})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def failure_of(error: LockstepError) -> Fields:
    """Return the error of a failed response, with a code that clients know."""
    codes = {"busy": "rate_limit_exceeded", "prompt_too_long": CODES["prompt_too_long"]}
    return {"code": codes.get(error.code, "server_error"), "message": error.message}
