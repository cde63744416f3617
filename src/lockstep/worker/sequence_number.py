"""The order of a caller's pauses and resumes: one that arrives late must not undo a later one."""

from __future__ import annotations

from lockstep.protocol.control.worker import SequenceNumber
from lockstep.tokens.errors import Conflict

CALLERS = 256
"""Callers that are remembered; the one that was silent for longest is forgotten first."""


class SequenceNumbers:
    """The last pause or resume that came from each caller."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def check(self, order: SequenceNumber | None) -> None:
        """Raises Conflict for one that was sent before another that came already.

        The same one again is a repetition, and no error. Without an order nothing is known.
        """
        if order is None:
            return
        last = self._last.pop(order.caller, order.number)
        self._last[order.caller] = max(last, order.number)
        if len(self._last) > CALLERS:
            del self._last[next(iter(self._last))]
        if order.number < last:
            raise Conflict(
                f"this is number {order.number} of {order.caller!r}, and came after its number "
                f"{last}: it is too late",
                param="order",
            )
