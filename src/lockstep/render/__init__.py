"""Messages to tokens and back: renderers, the bridge between turns, and the ledger of a session."""

from lockstep.render.answer import Answer, Call, CallStatus
from lockstep.render.breaks import Breaks
from lockstep.render.ledger import Ledger
from lockstep.render.messages import (
    Message,
    ToolCall,
    canonical,
    canonical_tools,
    plain_messages,
    plain_tools,
    same,
)
from lockstep.render.pieces import Piece, Pieces, Stream
from lockstep.render.plan import Cause, Plan
from lockstep.render.renderer import Renderer, Thinking
from lockstep.render.tree import Node

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
