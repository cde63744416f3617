"""The lease of a pause, which ends by itself unless it is renewed."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from time import time

from lockstep.tokens.errors import LockstepError

log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0


class Lease:
    """A timer that calls `end` with its Unix time, and retries every second while that fails."""

    def __init__(self, end: Callable[[float], Awaitable[None]]) -> None:
        self._end = end
        self._task: asyncio.Task[None] | None = None

    def watch(self, until: float | None, longest: float | None = None) -> None:
        """Set the timer to a Unix time, or clear it with None.

        It waits at most `longest` seconds, in case the clock was set back.
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
                log.warning("pause not ended at the end of its lease, retrying: %s", error.message)
            except Exception:
                # Any error: a fleet that stays paused for ever is worse than a retry.
                log.exception("pause not ended at the end of its lease, retrying")
            await asyncio.sleep(RETRY_SECONDS)
