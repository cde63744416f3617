"""Retries with exponential back-off while a gateway or a worker is unreachable."""

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
TRANSIENT = (
    Unavailable, DeadlineExceeded, Busy, VersionUnavailable, EngineFailure, UpdateFailed, Disproved,
)  # fmt: skip
"""Transient errors: a worker restarts, a queue is full, an update was rolled back."""
FIRST_SECONDS, MAX_SECONDS = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries a call for up to `seconds`, with exponential back-off from 0.1 to 5 s."""

    seconds: float = 300.0

    async def call(
        self,
        what: str,
        work: Callable[[int], Awaitable[T]],
        *,
        transient: tuple[type[LockstepError], ...] = TRANSIENT,
        between: Callable[[LockstepError], Awaitable[None]] | None = None,
    ) -> T:
        """Return the result of `work(attempt)`. `between` runs before each retry.

        Raises the last error when the time is over, and immediately any error that is not one of
        `transient`.
        """
        loop = asyncio.get_running_loop()
        until, attempt, wait = loop.time() + self.seconds, 0, FIRST_SECONDS
        while True:
            try:
                return await work(attempt)
            except transient as error:
                wait = min(max(wait * 2, error.retry_after or 0.0), MAX_SECONDS)
                if loop.time() + wait > until:
                    raise
                log.info("%s failed; retrying in %.1f s: %s", what, wait, error.message)
                await asyncio.sleep(wait)
                attempt += 1
                if between is not None:
                    await between(error)
