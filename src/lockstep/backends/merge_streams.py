"""Several asynchronous streams read as one, in the order in which their items arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge_streams(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they arrive, each with the number of its stream.

    An error of one stream ends all of them. A stream goes on only when its last item was taken, so
    that a slow reader slows the workers instead of filling this process.
    """
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()
    taken = [asyncio.Semaphore(0) for _ in streams]

    async def follow(at: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((at, item))
                    await taken[at].acquire()
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)
            raise

    tasks = [asyncio.create_task(follow(at, stream)) for at, stream in enumerate(streams)]
    open_streams = len(tasks)
    try:
        while open_streams:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
                taken[item[0]].release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
