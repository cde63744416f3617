"""How a listener ends: one drain setting, which decides when responses are cut off."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from lockstep.http.server.server import listen
from lockstep.tokens.errors import BadRequest
from tests.http.peer import HOST, Handlers, Peer, running


async def connect(port: int, **options: int) -> Peer:
    return Peer(*await asyncio.open_connection("127.0.0.1", port, **options))


async def test_the_end_waits_for_open_answers_and_takes_no_new_ones() -> None:
    handlers = Handlers()
    async with running(handlers, drain_seconds=20) as port:
        peer, idle = await connect(port), await connect(port)
        peer.send(f"GET /wait {HOST}")
        peer.send(f"GET /named?name=ahead {HOST}")
        await asyncio.wait_for(handlers.begun.wait(), 2)
        asyncio.get_running_loop().call_later(0.3, handlers.released.set)
        begun = monotonic()
    assert 0.2 < monotonic() - begun < 10
    head, body = await peer.response()
    assert body == b"released"
    assert "connection: close" in head
    assert await peer.rest() == b""
    assert await idle.rest() == b""
    assert handlers.order == []
    peer.writer.close()
    idle.writer.close()


async def test_the_end_waits_longer_than_five_seconds_where_it_is_told_to() -> None:
    handlers = Handlers()
    async with running(handlers, drain_seconds=20) as port:
        peer = await connect(port)
        peer.send(f"GET /events {HOST}")
        await asyncio.wait_for(handlers.begun.wait(), 2)
        asyncio.get_running_loop().call_later(5.5, handlers.released.set)
    assert (await peer.rest()).endswith(b"0\r\n\r\n")
    peer.writer.close()


async def test_the_end_cuts_off_what_takes_too_long_and_waits_for_its_handler() -> None:
    handlers = Handlers()
    async with running(handlers, drain_seconds=0.1) as port:
        peer = await connect(port)
        peer.send(f"GET /wait {HOST}")
        await asyncio.wait_for(handlers.begun.wait(), 2)
        begun = monotonic()
    assert 0.05 < monotonic() - begun < 5
    assert handlers.left.is_set()
    assert await peer.cut(1)
    peer.writer.close()


async def test_the_end_cancels_a_handler_that_does_not_look_whether_its_client_is_there() -> None:
    handlers = Handlers()
    async with running(handlers, drain_seconds=0.05) as port:
        peer = await connect(port)
        peer.send(f"GET /stubborn {HOST}")
        await asyncio.wait_for(handlers.begun.wait(), 2)
    assert handlers.left.is_set()
    peer.writer.close()


async def test_the_end_waits_for_clients_that_still_read() -> None:
    async with running(Handlers()) as port:
        peer = await connect(port, limit=1 << 16)
        body = b"x" * 20_000_000
        peer.send(f"POST /echo {HOST}\ncontent-length: {len(body)}", body)
        await peer.head()
        reading = asyncio.create_task(peer.reader.readexactly(len(body)))
    assert await asyncio.wait_for(reading, 5) == body
    peer.writer.close()


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_there_is_not_is_an_error_that_names_it(port: int) -> None:
    with pytest.raises(BadRequest, match=f"port is {port}: expected 0"):
        listen("127.0.0.1", port)
