"""Limit on concurrent requests, with a short queue in front of it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from lockstep.tokens.errors import BadRequest, Busy, Unavailable

RETRY_AFTER = 1.0


class AdmissionLimiter:
    """A limit of `limit` concurrent requests. Further requests queue.

    At most `queue_limit` requests wait, each for up to `seconds`. A released slot goes straight to
    the first request in the queue, so no later request overtakes it.
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
        self._queue: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self.taken = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def take_now(self) -> bool:
        """Take a slot if one is free; return whether it was."""
        if self.taken >= self._limit:
            return False
        self.taken += 1
        return True

    async def take(self) -> None:
        """Take a slot, queueing for it if none is free. Raises Busy at once when the queue is full,
        and Unavailable when no slot came free in time. A cancelled call leaves the queue."""
        if self.take_now():
            return
        if len(self._queue) >= self._queue_limit:
            # Without numbers: they are those of other tenants too. /metrics has them.
            raise Busy(
                "as many requests are running and queued as the gateway takes (--max-in-flight): "
                "try again later",
                retry_after=RETRY_AFTER,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[turn] = None
        try:
            async with asyncio.timeout(self._seconds):
                await turn
        except BaseException as error:
            self._queue.pop(turn, None)
            if _is_granted(turn):
                # The slot was granted in the same moment as the deadline or the cancellation. Pass
                # it on, or it would be lost for good.
                self.give()
            if isinstance(error, TimeoutError):
                raise Unavailable(
                    f"no slot came free within {self._seconds:g} s: as many requests are running "
                    "as the gateway takes (--max-in-flight)",
                    retry_after=RETRY_AFTER,
                ) from None
            raise

    def give(self) -> None:
        """Release a slot."""
        while self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self.taken -= 1

    def close(self, error: Unavailable) -> None:
        """Fail every queued request with `error`."""
        while self._queue:
            turn, _ = self._queue.popitem(last=False)
            if not turn.done():
                turn.set_exception(error)


def _is_granted(turn: asyncio.Future[None]) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None
