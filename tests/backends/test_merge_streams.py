"""Several streams merged into one: items as they arrive, one failure for all, no running ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from lockstep.backends.merge_streams import merge_streams


class Stream:
    """Yields numbers on demand, and records how far it got and whether it was closed."""

    def __init__(self, *items: int, fails: bool = False) -> None:
        self.produced: list[int] = []
        self.closed = False
        self._items, self._fails = items, fails

    async def __call__(self) -> AsyncGenerator[int, None]:
        try:
            for item in self._items:
                await asyncio.sleep(0)
                self.produced.append(item)
                yield item
            if self._fails:
                raise ValueError("broken")
            await asyncio.sleep(0)
        finally:
            self.closed = True


async def test_every_item_has_the_index_of_its_stream() -> None:
    streams = Stream(1, 2), Stream(), Stream(3)
    items = [item async for item in merge_streams([stream() for stream in streams])]
    assert sorted(items) == [(0, 1), (0, 2), (2, 3)]
    assert all(stream.closed for stream in streams)


async def test_an_error_of_one_stream_ends_all() -> None:
    endless, broken = Stream(*range(1000)), Stream(1, fails=True)
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge_streams([endless(), broken()]):
            pass
    assert endless.closed
    assert len(endless.produced) < 1000


async def test_a_stream_does_not_run_ahead_of_its_reader() -> None:
    stream = Stream(*range(100))
    async with aclosing(merge_streams([stream()])) as items:
        await anext(items)
        for _ in range(50):
            await asyncio.sleep(0)
        assert stream.produced == [0]
    assert stream.closed
