"""Several asynchronous streams merged into one, in the order in which their items arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge_streams(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all streams as they arrive, each with the index of its stream.

    An error of one stream ends all of them. The next item of a stream is read only after its last
    one was taken, so that a slow reader slows the workers instead of filling this process's memory.
    """
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()
    taken = [asyncio.Semaphore(0) for _ in streams]

    async def follow(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item))
                    await taken[index].acquire()
            queue.put_nowait(None)
        except BaseException as error:
            queue.put_nowait(error)
            raise

    tasks = [asyncio.create_task(follow(index, stream)) for index, stream in enumerate(streams)]
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
