"""Rejection of a pause or resume that arrives after a later one from the same caller."""

from __future__ import annotations

from lockstep.protocol.control.worker import SequenceNumber
from lockstep.tokens.errors import Conflict

CALLERS = 256
"""Number of callers tracked. The least recently active one is dropped first."""


class SequenceNumbers:
    """The highest sequence number received from each caller."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def check(self, sequence_number: SequenceNumber | None) -> None:
        """Raise Conflict for a number below the highest of its caller. None is never rejected.

        The highest number again is a retry of the same message and accepted.
        """
        if sequence_number is None:
            return
        caller, number = sequence_number.caller, sequence_number.number
        highest = self._highest.pop(caller, number)
        self._highest[caller] = max(highest, number)  # moved to the end: most recently active
        if len(self._highest) > CALLERS:
            del self._highest[next(iter(self._highest))]
        if number < highest:
            raise Conflict(
                f"message {number} of {caller!r} arrived after its message {highest}: it is too "
                "late",
                param="order",
            )
