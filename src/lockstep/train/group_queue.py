"""A queue of rollout groups that are played while the trainer learns, in the order of their tasks.

The order they end in would be that of their length: a trainer that takes what is there first learns
from short answers, and long ones grow too old for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

from lockstep.train.envs.environment import Task
from lockstep.train.learning.batch import RolloutGroup

Play = Callable[[int, Task], Awaitable[RolloutGroup]]


class GroupQueue:
    """Plays tasks while the block runs, at most `limit` that were not released yet."""

    def __init__(self, tasks: Iterator[tuple[int, Task]], play: Play, *, limit: int) -> None:
        self._tasks = tasks
        self._play = play
        self._permits = asyncio.Semaphore(limit)
        self._begun: asyncio.Queue[asyncio.Task[RolloutGroup] | None] = asyncio.Queue()
        self._running: set[asyncio.Task[RolloutGroup]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> GroupQueue:
        self._feeder = asyncio.create_task(self._feed(), name="rollouts")
        self._feeder.add_done_callback(self._on_fed)
        return self

    async def __aexit__(self, *_: object) -> None:
        every = [self._feeder, *self._running]
        for task in every:
            task.cancel()
        for task in every:
            with suppress(asyncio.CancelledError, Exception):
                await task
        self._failed.cancel()

    async def take(self) -> RolloutGroup | None:
        """The next group; None when the tasks have ended and all of them were taken.

        Raises the error of a group that failed for good, of any that runs, and that of the source
        of tasks once its groups were taken.
        """
        playing = await self._begun.get()
        if playing is None:
            self._begun.put_nowait(None)
            self._feeder.result()
            return None
        await asyncio.wait((playing, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            self._failed.result()
        return playing.result()

    def release(self, count: int) -> None:
        """Lets so many more be played, now that the weights that learnt from others are served."""
        for _ in range(count):
            self._permits.release()

    async def _feed(self) -> None:
        for number, task in self._tasks:
            await self._permits.acquire()
            playing = asyncio.ensure_future(self._play(number, task))
            self._running.add(playing)
            playing.add_done_callback(self._on_end)
            self._begun.put_nowait(playing)

    def _on_end(self, playing: asyncio.Task[RolloutGroup]) -> None:
        self._running.discard(playing)
        if playing.cancelled():
            return
        error = playing.exception()  # of several that fail only the first is told
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()

    def _on_fed(self, _: asyncio.Task[None]) -> None:
        """Wakes whoever waits in `take` for a source that gives nothing more."""
        self._begun.put_nowait(None)
