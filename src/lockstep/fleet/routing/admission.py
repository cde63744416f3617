"""Bounds how many requests run at once; a few more wait in line, and not for long."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from lockstep.tokens.errors import BadRequest, Busy, Unavailable

RETRY_AFTER = 1.0


class AdmissionLimiter:
    """`limit` slots. Those who find none wait in line, at most `queue_limit` and `seconds`.

    A slot that is given back goes straight to the first in line, so nobody overtakes.
    """

    def __init__(self, limit: int, queue_limit: int, seconds: float) -> None:
        for name, value, least in (
            ("max_in_flight", limit, 1),
            ("queue_limit", queue_limit, 0),
            ("queue_seconds", seconds, 0.0),
        ):
            if not value >= least:
                raise BadRequest(f"{name} is {value}: expected at least {least}", param=name)
        self._limit = limit
        self._queue_limit = queue_limit
        self._seconds = seconds
        self._line: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self.taken = 0

    @property
    def waiting(self) -> int:
        return len(self._line)

    def take_now(self) -> bool:
        """Takes a slot if one is free."""
        if self.taken >= self._limit:
            return False
        self.taken += 1
        return True

    async def take(self) -> None:
        """Takes a slot, waiting in line for it. Raises Busy at once when the line is full, and
        Unavailable when none came in time. Cancelled, it leaves the line."""
        if self.take_now():
            return
        if len(self._line) >= self._queue_limit:
            raise Busy(
                f"{self.taken} requests are running and {len(self._line)} are waiting, which is "
                "all that may: try again later",
                retry_after=RETRY_AFTER,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line[turn] = None
        try:
            async with asyncio.timeout(self._seconds):
                await turn
        except BaseException as error:
            self._line.pop(turn, None)
            if _granted(turn):
                # It came at the same moment as the deadline or the cancellation: pass it on.
                self.give()
            if isinstance(error, TimeoutError):
                raise Unavailable(
                    f"no slot came free within {self._seconds:g} s: {self.taken} requests are "
                    f"running and {len(self._line)} are waiting",
                    retry_after=RETRY_AFTER,
                ) from None
            raise

    def give(self) -> None:
        """Gives a slot back."""
        while self._line:
            turn, _ = self._line.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self.taken -= 1

    def close(self, error: Unavailable) -> None:
        """Sends everybody in line away with `error`."""
        while self._line:
            turn, _ = self._line.popitem(last=False)
            if not turn.done():
                turn.set_exception(error)


def _granted(turn: asyncio.Future[None]) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None
