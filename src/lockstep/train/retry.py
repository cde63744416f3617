"""Trying again, with back-off, while a gateway or a worker is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from lockstep.tokens.errors import (
    Busy,
    DeadlineExceeded,
    Disproved,
    EngineFailure,
    LockstepError,
    Unavailable,
    UpdateFailed,
    VersionUnavailable,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
PASSING = (
    Unavailable, DeadlineExceeded, Busy, VersionUnavailable, EngineFailure, UpdateFailed, Disproved,
)  # fmt: skip
"""Errors that pass: a worker restarts, a queue empties, an update is undone and tried again."""
FIRST, LONGEST = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Tries a call for up to `seconds`, with exponential back-off."""

    seconds: float = 300.0

    async def call(
        self,
        what: str,
        work: Callable[[int], Awaitable[T]],
        *,
        passing: tuple[type[LockstepError], ...] = PASSING,
        between: Callable[[LockstepError], Awaitable[None]] | None = None,
    ) -> T:
        """The result of `work(attempt)`. `between` runs before each new attempt.

        Raises the last error when the time is over, and at once any that is not of `passing`.
        """
        loop = asyncio.get_running_loop()
        until, attempt, wait = loop.time() + self.seconds, 0, FIRST
        while True:
            try:
                return await work(attempt)
            except passing as error:
                wait = min(max(wait * 2, error.retry_after or 0.0), LONGEST)
                if loop.time() + wait > until:
                    raise
                log.info("%s failed, trying again in %.1f s: %s", what, wait, error.message)
                await asyncio.sleep(wait)
                attempt += 1
                if between is not None:
                    await between(error)
