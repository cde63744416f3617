"""Anthropic's messages dialect, POST /v1/messages: requests and their strict decoding.

Fields without an effect here are accepted by name (`ACCEPTED`) and listed in a response header; any
other unknown field is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from lockstep.protocol.json.strict import decode
from lockstep.tokens.errors import BadRequest, UnsupportedField

ACCEPTED: Mapping[str, str] = {
    "cache_control": "Claude Code 2.1.325, opencode 1.18.33, Qwen Code 0.24.4, litellm 1.83.0",
    "context_management": "Claude Code 2.1.325",
    "metadata": "Claude Code 2.1.325",
    "output_config.effort": "Claude Code 2.1.325",
    "service_tier": "anthropic 2.8.0",
    "thinking.budget_tokens": "Claude Code 2.1.325, opencode 1.18.33, Qwen Code 0.24.4",
    "thinking.display": "Claude Code 2.1.325",
}
"""Fields accepted without effect, with the clients that send them."""


class _Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    cache_control: Any = None


class TextBlock(_Block, tag="text"):
    text: str
    citations: Any = None


class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    data: str


class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolReferenceBlock(_Block, tag="tool_reference"):
    """A tool that a tool search returned: its definition is in the request's tools."""

    tool_name: str


class ImageBlock(_Block, tag="image"):
    source: Any = None


class DocumentBlock(_Block, tag="document"):
    source: Any = None
    title: str | None = None
    context: str | None = None
    citations: Any = None


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ToolReferenceBlock | ImageBlock | DocumentBlock] = ""
    is_error: bool | None = None


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | ImageBlock
    | DocumentBlock
)


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message. Claude Code sends `role: system` and `output_config` inside the messages."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    output_config: Any = None


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the client runs; with `defer_loading` it is hidden until a reference to it."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str = ""
    type: str = "custom"
    defer_loading: bool | None = None
    cache_control: Any = None
    strict: bool | None = None
    input_examples: Any = None
    eager_input_streaming: bool | None = None


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class ThreadConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A thread: the server holds the conversation under the id of each response."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class MessagesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The request body. `max_tokens` is optional only for counting tokens."""

    model: str
    messages: list[InputMessage]
    max_tokens: int | None = None
    system: str | list[TextBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: Any = None
    context_management: Any = None
    service_tier: str | None = None
    cache_control: Any = None
    thread: ThreadConfig | None = None

    def accepted(self) -> list[str]:
        """The fields of this request that are accepted without effect."""
        nested = (
            ("output_config.effort", self.output_config and self.output_config.effort),
            ("thinking.budget_tokens", self.thinking and self.thinking.budget_tokens),
            ("thinking.display", self.thinking and self.thinking.display),
        )
        own = ((name, getattr(self, name)) for name in ACCEPTED if "." not in name)
        return sorted(name for name, value in (*own, *nested) if value is not None)


DECODER = msgspec.json.Decoder(MessagesRequest)


def decode_messages(body: bytes) -> MessagesRequest:
    """Decode the request in `body`. Raises BadRequest, UnknownField or UnsupportedField."""
    request = decode_count(body)
    if request.max_tokens is None:
        raise BadRequest("max_tokens: Field required", param="max_tokens")
    if request.max_tokens < 1:
        raise BadRequest(f"max_tokens: {request.max_tokens} is less than 1", param="max_tokens")
    for at, sequence in enumerate(request.stop_sequences or ()):
        if not sequence:
            where = f"stop_sequences.{at}"
            raise BadRequest(f"{where}: a stop sequence must not be empty", param=where)
    return request


def decode_count(body: bytes) -> MessagesRequest:
    """Decode a request to count tokens. Raises as `decode_messages` does."""
    request = decode(DECODER, body)
    if not request.messages:
        raise BadRequest("messages: at least one message is required", param="messages")
    for at, tool in enumerate(request.tools or ()):
        if tool.type != "custom" or tool.input_schema is None:
            raise UnsupportedField(
                f"tools.{at}.type: {tool.type!r} is a tool that Anthropic's servers run; only "
                "tools with an input_schema, which the client runs, can be called here",
                param=f"tools.{at}.type",
            )
    return request
