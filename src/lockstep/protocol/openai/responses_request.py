"""OpenAI's responses dialect, POST /v1/responses: requests and their strict decoding.

Fields without effect here are accepted by name (`ACCEPTED`) and listed in a response header; any
other unknown field is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.protocol.json.strict import decode, refuse_unless_neutral
from lockstep.tokens.errors import BadRequest, UnsupportedField

ACCEPTED: Mapping[str, str] = {
    "client_metadata": "Codex 0.166.0",
    "max_tool_calls": "openai 3.49.0",
    "metadata": "openai 3.49.0",
    "parallel_tool_calls": "Codex 0.166.0 (false, with tools that it runs one by one)",
    "prompt_cache_key": "Codex 0.166.0, opencode 1.18.33, Qwen Code 0.24.4",
    "prompt_cache_retention": "openai 3.49.0",
    "reasoning.context": "Codex 0.166.0",
    "reasoning.effort": "Codex 0.166.0, opencode 1.18.33",
    "reasoning.summary": "Codex 0.166.0, opencode 1.18.33 (thinking always comes, as it is)",
    "safety_identifier": "openai 3.49.0",
    "service_tier": "openai 3.49.0",
    "stream_options": "openai 3.49.0",
    "text.verbosity": "Codex 0.166.0",
    "truncation": "openai 3.49.0 (nothing is ever left out of a prompt)",
    "user": "openai 3.49.0",
}
"""Fields that are accepted without effect, with the clients that send them."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "moderation": (),
}
"""Fields that are accepted at these values only."""
INCLUDES = ("reasoning.encrypted_content",)


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The request body. `input` is text, or items (see `responses_items`)."""

    model: str
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None

    client_metadata: Any = None
    max_tool_calls: int | None = None
    metadata: Any = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: Any = None
    truncation: str | None = None
    user: str | None = None

    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None
    moderation: Any = None

    def accepted(self) -> list[str]:
        """Return the fields of this request that are accepted without effect."""
        names = []
        for name in ACCEPTED:
            owner, _, field = name.rpartition(".")
            holder = getattr(self, owner) if owner else self
            if holder is not None and getattr(holder, field) is not None:
                names.append(name)
        return names


DECODER = msgspec.json.Decoder(ResponsesRequest)


def decode_responses(body: bytes) -> ResponsesRequest:
    """Return the request in `body`. Raises BadRequest, UnknownField or UnsupportedField."""
    request = decode(DECODER, body)
    refuse_unless_neutral(request, NEUTRAL)
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise BadRequest(
            f"max_output_tokens is {request.max_output_tokens}: expected at least 1",
            param="max_output_tokens",
        )
    for name in request.include or ():
        if name not in INCLUDES:
            raise UnsupportedField(
                f"include holds {name!r}: only {', '.join(INCLUDES)} can be included here",
                param="include",
            )
    if not request.input and request.previous_response_id is None:
        raise BadRequest("input is empty: expected text or items", param="input")
    return request
