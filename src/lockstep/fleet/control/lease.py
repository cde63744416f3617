"""The lease of a pause: it ends by itself when nobody comes back to end or renew it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from time import time

from lockstep.tokens.errors import LockstepError

log = logging.getLogger(__name__)
AGAIN_SECONDS = 1.0


class Lease:
    """Calls `end` with the time it watched for, once that has come; again while that fails."""

    def __init__(self, end: Callable[[float], Awaitable[None]]) -> None:
        self._end = end
        self._task: asyncio.Task[None] | None = None

    def watch(self, until: float | None, longest: float | None = None) -> None:
        """Watches for this Unix time instead of the one before; None: for nothing.

        It never waits more than `longest` seconds: the clock may have been set back since.
        """
        if self._task is not None:
            self._task.cancel()
        self._task = None
        if until is not None:
            seconds = min(max(until - time(), 0.0), math.inf if longest is None else longest)
            self._task = asyncio.create_task(self._wait(until, seconds), name="pause lease")

    async def _wait(self, until: float, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while True:
            try:
                return await self._end(until)
            except LockstepError as error:
                log.warning("a pause could not be ended yet: %s", error.message)
            except Exception:
                # Whatever it was, a fleet that stays paused for ever is worse than trying again.
                log.exception("a pause could not be ended yet")
            await asyncio.sleep(AGAIN_SECONDS)
