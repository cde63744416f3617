"""A queue of rollout groups that are sampled while the trainer learns, in the order of their tasks.

In the order of completion the trainer would learn from short responses first, and the long ones
would become too old to learn from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

from lockstep.train.envs.environment import Task
from lockstep.train.learning.batch import RolloutGroup

RunGroup = Callable[[int, Task], Awaitable[RolloutGroup]]


class GroupQueue:
    """Runs the groups of tasks within the block; at most `limit` of them are not released yet."""

    def __init__(
        self, tasks: Iterator[tuple[int, Task]], run_group: RunGroup, *, limit: int
    ) -> None:
        self._tasks = tasks
        self._run_group = run_group
        self._permits = asyncio.Semaphore(limit)
        self._started: asyncio.Queue[asyncio.Task[RolloutGroup] | None] = asyncio.Queue()
        self._running: set[asyncio.Task[RolloutGroup]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> GroupQueue:
        self._feeder = asyncio.create_task(self._feed(), name="rollouts")
        self._feeder.add_done_callback(self._on_fed)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [self._feeder, *self._running]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task
        self._failed.cancel()

    async def take(self) -> RolloutGroup | None:
        """Return the next group; None when the tasks have ended and all groups were taken.

        Raises the error of any running group that failed for good. Raises the error of the task
        source once all of its groups were taken.
        """
        running = await self._started.get()
        if running is None:
            self._started.put_nowait(None)
            self._feeder.result()
            return None
        await asyncio.wait((running, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()
        return running.result()

    def release(self, count: int) -> None:
        """Allow `count` more groups, now that weights that learnt from others are served."""
        for _ in range(count):
            self._permits.release()

    async def _feed(self) -> None:
        for number, task in self._tasks:
            await self._permits.acquire()
            running = asyncio.ensure_future(self._run_group(number, task))
            self._running.add(running)
            running.add_done_callback(self._on_end)
            self._started.put_nowait(running)

    def _on_end(self, running: asyncio.Task[RolloutGroup]) -> None:
        self._running.discard(running)
        if running.cancelled():
            return
        error = running.exception()  # only the first of several errors is reported
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()

    def _on_fed(self, _: asyncio.Task[None]) -> None:
        """Wake a caller of `take` that waits for a source without further tasks."""
        self._started.put_nowait(None)
