"""Messages to tokens and back: renderers, the bridge between turns, and the ledger of a session."""

from lockstep.render.parsed_message import Answer, Call, CallStatus
from lockstep.ledger.breaks import Breaks
from lockstep.ledger.ledger import Ledger
from lockstep.render.messages import (
    Message,
    ToolCall,
    canonical,
    canonical_tools,
    plain_messages,
    plain_tools,
    same,
)
from lockstep.render.token_bytes import Piece, Pieces, Stream
from lockstep.ledger.matching import Cause, Plan
from lockstep.render.renderer import Renderer, Thinking
from lockstep.ledger.tree import Node

__all__ = [
    "Answer",
    "Breaks",
    "Call",
    "CallStatus",
    "Cause",
    "Ledger",
    "Message",
    "Node",
    "Piece",
    "Pieces",
    "Plan",
    "Renderer",
    "Stream",
    "Thinking",
    "ToolCall",
    "canonical",
    "canonical_tools",
    "plain_messages",
    "plain_tools",
    "same",
]
