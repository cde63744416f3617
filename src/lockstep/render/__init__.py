"""Messages to tokens and back: renderers, templates, the bridge between turns, parsing."""

from lockstep.render.messages import (
    Message,
    ToolCall,
    canonical,
    canonical_tools,
    plain_messages,
    plain_tools,
    same,
)
from lockstep.render.parsed_message import Call, CallStatus, ParsedMessage
from lockstep.render.renderer import Renderer, Thinking
from lockstep.tokens.token_bytes import TokenBytes, TokenBytesTable, TokenTextDecoder

__all__ = [
    "Call",
    "CallStatus",
    "Message",
    "ParsedMessage",
    "Renderer",
    "Thinking",
    "TokenBytes",
    "TokenBytesTable",
    "TokenTextDecoder",
    "ToolCall",
    "canonical",
    "canonical_tools",
    "plain_messages",
    "plain_tools",
    "same",
]
