"""Tree of the turns of a session: stored ids, matching of histories, samples."""

from lockstep.ledger.breaks import Breaks
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.matching import Cause, PromptPlan
from lockstep.ledger.tree import Node, Reply

__all__ = [
    "Breaks",
    "Cause",
    "Ledger",
    "Node",
    "PromptPlan",
    "Reply",
]
