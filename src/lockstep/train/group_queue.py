"""A queue of rollout groups that are played while the trainer learns, in the order they end."""

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
        self._ended: asyncio.Queue[asyncio.Task[RolloutGroup] | BaseException | None] = (
            asyncio.Queue()
        )
        self._running: set[asyncio.Task[RolloutGroup]] = set()

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

    async def take(self) -> RolloutGroup | None:
        """The next group; None when the tasks have ended and all of them were taken.

        Raises the error of a group that failed for good, and that of the task source.
        """
        played = await self._ended.get()
        if isinstance(played, BaseException):
            raise played
        return None if played is None else played.result()

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

    def _on_end(self, playing: asyncio.Task[RolloutGroup]) -> None:
        self._running.discard(playing)
        if not playing.cancelled():
            playing.exception()  # of several that fail only the first is taken: no log of the rest
            self._ended.put_nowait(playing)
        self._tell_end()

    def _on_fed(self, feeder: asyncio.Task[None]) -> None:
        if not feeder.cancelled() and (error := feeder.exception()) is not None:
            self._ended.put_nowait(error)
        self._tell_end()

    def _tell_end(self) -> None:
        """Wakes whoever waits in `take` for a source that gives nothing more."""
        if self._feeder.done() and not self._running:
            self._ended.put_nowait(None)
