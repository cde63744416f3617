"""The event stream costs nothing while nobody looks, and is computed once for all who do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from lockstep.dashboard.feed import Feed, Parts


class Row(msgspec.Struct):
    value: int


class Source:
    """Parts that a test changes; it counts how often they are read."""

    def __init__(self) -> None:
        self.reads = 0
        self.parts: dict[str, Any] = {"one": Row(1), "many": {"a": Row(1), "b": Row(2)}}

    async def read(self) -> Parts:
        self.reads += 1
        return self.parts


async def next_event(events: Any) -> dict[str, Any]:
    async with asyncio.timeout(5):
        raw = await anext(events)
    event: dict[str, Any] = json.loads(raw.removeprefix(b"data: "))
    del event["at"]
    return event


async def test_nobody_looks_and_nothing_is_read() -> None:
    source = Source()
    feed = Feed(source.read, asyncio.Event(), 0.01)
    await asyncio.sleep(0.05)
    assert source.reads == 0
    events = feed.watch()
    await next_event(events)
    await events.aclose()
    await asyncio.sleep(0)
    seen = source.reads
    await asyncio.sleep(0.05)
    assert (source.reads, feed.viewers) == (seen, 0)
    assert len(asyncio.all_tasks()) == 1, "no timer is left"


async def test_only_what_changed_is_sent_row_by_row() -> None:
    source = Source()
    events = Feed(source.read, asyncio.Event(), 0.01).watch()
    assert await next_event(events) == {
        "one": {"value": 1}, "many": {"a": {"value": 1}, "b": {"value": 2}},
    }  # fmt: skip
    source.parts["many"] = {"a": Row(1), "b": Row(3), "c": Row(4)}
    assert await next_event(events) == {"many": {"b": {"value": 3}, "c": {"value": 4}}}
    source.parts["many"] = {"a": Row(1), "c": Row(4)}
    assert await next_event(events) == {"many": {"b": None}}
    await events.aclose()


async def test_a_slow_viewer_misses_states_but_no_change() -> None:
    source = Source()
    events = Feed(source.read, asyncio.Event(), 0.01).watch()
    await next_event(events)
    for value in range(20):
        source.parts["one"] = Row(value)
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.03)
    assert await next_event(events) == {"one": {"value": 19}}
    await events.aclose()


async def test_many_viewers_cost_one_reading() -> None:
    source = Source()
    feed = Feed(source.read, asyncio.Event(), 0.02)
    viewers = [feed.watch() for _ in range(5)]
    for events in viewers:
        await next_event(events)
    before = source.reads
    await asyncio.sleep(0.1)
    assert source.reads - before <= 6
    for events in viewers:
        await events.aclose()


async def test_a_stop_ends_every_stream() -> None:
    source, stop = Source(), asyncio.Event()
    events = Feed(source.read, stop, 30.0).watch()
    await next_event(events)
    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(2):
        assert [event async for event in events] == []


async def test_a_failed_reading_ends_the_streams_so_that_viewers_come_again() -> None:
    source = Source()
    events = Feed(source.read, asyncio.Event(), 0.01).watch()
    await next_event(events)
    source.parts = None  # type: ignore[assignment]
    async with asyncio.timeout(2):
        assert [event async for event in events] == []
