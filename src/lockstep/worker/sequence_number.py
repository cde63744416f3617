"""Refuses a pause or resume that arrives after a later one of the same caller."""

from __future__ import annotations

from lockstep.protocol.control.worker import SequenceNumber
from lockstep.tokens.errors import Conflict

CALLERS = 256
"""Callers that are remembered; the one that was silent for longest is forgotten first."""


class SequenceNumbers:
    """The highest sequence number that came from each caller."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def check(self, sequence_number: SequenceNumber | None) -> None:
        """Raises Conflict for a number below the highest of its caller; None is never refused.

        The highest again is a repetition of the same message, and no error.
        """
        if sequence_number is None:
            return
        caller, number = sequence_number.caller, sequence_number.number
        highest = self._highest.pop(caller, number)
        self._highest[caller] = max(highest, number)  # last in the dict: it was heard last
        if len(self._highest) > CALLERS:
            del self._highest[next(iter(self._highest))]
        if number < highest:
            raise Conflict(
                f"this is number {number} of {caller!r}, and came after its number {highest}: it "
                "is too late",
                param="order",
            )
