"""The lease of a pause: it ends by itself when nobody comes back to end or renew it."""

from __future__ import annotations

import asyncio
import logging
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

    def watch(self, until: float | None) -> None:
        """Watches for this Unix time instead of the one before; None: for nothing."""
        if self._task is not None:
            self._task.cancel()
        self._task = None
        if until is not None:
            self._task = asyncio.create_task(self._wait(until), name="pause lease")

    async def _wait(self, until: float) -> None:
        await asyncio.sleep(max(until - time(), 0))
        while True:
            try:
                return await self._end(until)
            except LockstepError as error:
                log.warning("a pause could not be ended yet: %s", error.message)
            await asyncio.sleep(AGAIN_SECONDS)
