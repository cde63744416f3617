"""Pieces that are written together reach the socket together, in their order, before any end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.http.server.coalescing import HELD_BYTES, CoalescingTransport


class Recorded:
    """A transport that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def write_eof(self) -> None:
        self.calls.append("eof")

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def is_closing(self) -> bool:
        return "close" in self.calls

    def get_write_buffer_size(self) -> int:
        return 5


def coalescing() -> tuple[Any, Recorded]:
    recorded = Recorded()
    transport: Any = recorded
    return CoalescingTransport(transport, asyncio.get_running_loop()), recorded


async def test_what_one_turn_writes_is_written_once_and_the_next_turn_has_its_own() -> None:
    transport, recorded = coalescing()
    for piece in (b"a", b"b", b"c"):
        transport.write(piece)
    assert recorded.calls == []
    assert transport.get_write_buffer_size() == 3 + 5
    await asyncio.sleep(0)
    transport.write(b"d")
    await asyncio.sleep(0)
    assert recorded.calls == [b"abc", b"d"]


async def test_more_than_is_held_goes_to_the_socket_whose_flow_control_then_sees_it() -> None:
    transport, recorded = coalescing()
    for _ in range(3):
        transport.write(b"x" * (HELD_BYTES // 2))
    assert [len(data) for data in recorded.calls] == [HELD_BYTES // 2 * 3]
    transport.write(b"y")
    await asyncio.sleep(0)
    assert recorded.calls[1:] == [b"y"]


@pytest.mark.parametrize(
    ("end", "calls"),
    [
        (lambda transport: transport.close(), [b"ab", "close"]),
        (lambda transport: transport.write_eof(), [b"ab", "eof"]),
        (lambda transport: transport.abort(), ["abort"]),
    ],
)
async def test_an_end_comes_after_what_was_written_unless_it_is_an_abort(
    end: Callable[[Any], None], calls: list[Any]
) -> None:
    transport, recorded = coalescing()
    transport.write(b"a")
    transport.write(b"b")
    end(transport)
    await asyncio.sleep(0)
    assert recorded.calls == calls
    assert transport.is_closing() == ("close" in calls)


async def test_what_was_written_to_a_peer_that_left_meanwhile_is_dropped() -> None:
    transport, recorded = coalescing()
    transport.write(b"a")
    recorded.close()
    await asyncio.sleep(0)
    assert recorded.calls == ["close"]
