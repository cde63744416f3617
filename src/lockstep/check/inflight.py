"""A generation in flight whose progress is known, so that a row can act in the middle of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from lockstep.backends.transport import StreamDelta
from lockstep.check.outcome import Broken, NotApplicable
from lockstep.check.target import Target
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion

BEGUN = 4
LOOK = 0.002
"""Seconds between two checks of the progress: short, because small engines are fast."""


class InFlight:
    """One streamed request. `tokens` are those received so far; `sent_at` and `ended_at` are times
    of `time.monotonic`.
    """

    def __init__(self, target: Target, request: GenerateRequest) -> None:
        self.tokens: list[int] = []
        self.sent_at = time.monotonic()
        self.ended_at: float | None = None
        self._target = target
        self._request = request
        self.task = asyncio.create_task(self._follow())

    async def begun(self, tokens: int = BEGUN) -> int:
        """Wait for the first tokens and return their number.

        Raises NotApplicable if the request has already ended, because nothing can act on it any
        more.
        """
        while len(self.tokens) < tokens and not self.task.done():
            await asyncio.sleep(LOOK)
        if self.task.done():
            completion = await self.task
            raise NotApplicable(
                f"all its {len(completion.token_ids)} tokens came before anything could happen"
            )
        return len(self.tokens)

    async def end(self) -> Completion:
        return await self.task

    def share_after(self, moment: float) -> float:
        """Return which part of the request's duration came after a moment of `time.monotonic`."""
        ended = time.monotonic() if self.ended_at is None else self.ended_at
        return max(ended - moment, 0.0) / max(ended - self.sent_at, 1e-9)

    async def _follow(self) -> Completion:
        completions: list[Completion] = []
        async with aclosing(self._target.transport.stream(self._request)) as items:
            async for item in items:
                if isinstance(item, StreamDelta):
                    self.tokens += item.token_ids
                else:
                    completions.append(item)
        self.ended_at = time.monotonic()
        if len(completions) != 1:
            raise Broken(f"a stream of one choice ended with {len(completions)} completions")
        return completions[0]


@asynccontextmanager
async def in_flight(target: Target, request: GenerateRequest) -> AsyncIterator[InFlight]:
    """Run a request, cancelled at the end of the block if it is still running."""
    running = InFlight(target, request)
    try:
        yield running
    finally:
        running.task.cancel()
        await asyncio.wait((running.task,))
