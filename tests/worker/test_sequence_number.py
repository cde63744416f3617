"""Pauses and resumes of a caller take effect in the order in which they were sent."""

from __future__ import annotations

import pytest

from lockstep.protocol.control.worker import SequenceNumber
from lockstep.tokens.errors import Conflict
from lockstep.worker.sequence_number import CALLERS, SequenceNumbers


def test_a_message_older_than_one_received_is_rejected() -> None:
    arrivals = SequenceNumbers()
    for number in (1, 2, 2, 5):  # a repetition is no error, nor is one that got lost for good
        arrivals.check(SequenceNumber(caller="a", number=number))
    for number in (4, 4):
        with pytest.raises(Conflict, match=r"message 4 of 'a'.*message 5"):
            arrivals.check(SequenceNumber(caller="a", number=number))
    arrivals.check(SequenceNumber(caller="b", number=1))
    arrivals.check(None)


def test_inactive_callers_are_dropped() -> None:
    arrivals = SequenceNumbers()
    arrivals.check(SequenceNumber(caller="old", number=9))
    arrivals.check(SequenceNumber(caller="busy", number=9))
    for index in range(CALLERS - 1):
        arrivals.check(SequenceNumber(caller=str(index), number=9))
        arrivals.check(SequenceNumber(caller="busy", number=9))
    arrivals.check(SequenceNumber(caller="old", number=1))
    with pytest.raises(Conflict):
        arrivals.check(SequenceNumber(caller="busy", number=1))
