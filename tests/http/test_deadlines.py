"""What waits for a client has a deadline, and connections have a number."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from lockstep.http.server.limits import RESERVED_DESCRIPTORS, ServerLimits, connections_within
from lockstep.http.server.protocol import HttpProtocol, ListenerConfig
from tests.http.peer import HOST, Handlers, connected, running, talking

QUICK = ServerLimits(
    keep_alive_seconds=0.2,
    head_seconds=0.2,
    progress_seconds=0.2,
    progress_bytes=1000,
    linger_seconds=0.1,
    sweep_seconds=0.02,
)
PATIENT = 30.0


async def test_an_idle_connection_is_closed_after_a_while() -> None:
    async with talking(Handlers(), QUICK) as peer:
        assert await peer.rest() == b""
    async with talking(Handlers(), QUICK) as peer:
        peer.send(f"GET /echo {HOST}")
        await peer.response()
        assert await peer.rest() == b""


@pytest.mark.parametrize("dribbled", [b"", b"x"])
async def test_half_a_head_is_refused_after_a_while(dribbled: bytes) -> None:
    async with talking(Handlers(), QUICK) as peer:
        peer.writer.write(b"GET /echo HTTP/1.1\r\nx-slow: ")
        reading = asyncio.create_task(peer.rest())
        while not reading.done():
            peer.writer.write(dribbled)
            await asyncio.sleep(0.01)
        assert (await reading).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("dribbled", [b"", b"x"], ids=["silent", "dribbled"])
async def test_a_body_that_makes_no_progress_is_refused_and_its_handler_told(
    dribbled: bytes,
) -> None:
    handlers = Handlers()
    async with talking(handlers, QUICK) as peer:
        peer.send(
            f"POST /limited {HOST}\ncontent-type: application/json\ncontent-length: 900", b"x" * 100
        )
        reading = asyncio.create_task(peer.rest())
        while not reading.done():
            peer.writer.write(dribbled)
            await asyncio.sleep(0.01)
        assert (await reading).startswith(b"HTTP/1.1 408 ")
        assert handlers.order == ["ClientGone"]


async def test_a_slow_body_that_makes_progress_is_read() -> None:
    async with talking(Handlers(), QUICK) as peer:
        peer.send(f"POST /echo {HOST}\ncontent-length: 12000")
        for _ in range(60):
            peer.writer.write(b"x" * 200)
            await asyncio.sleep(0.01)
        assert len((await peer.response())[1]) == 12_000


async def test_a_body_without_end_behind_its_answer_is_cut_off() -> None:
    async with talking(Handlers(), QUICK) as peer:
        peer.send(
            f"POST /limited {HOST}\ncontent-type: application/json\ncontent-length: 3000000",
            b"x" * 2000,
        )
        assert (await peer.response())[0].startswith("http/1.1 413")
        assert await peer.cut()


@pytest.mark.failure_mode("F47")
async def test_an_answer_that_nobody_reads_is_given_up_and_its_handler_ended() -> None:
    handlers = Handlers()
    async with running(handlers, QUICK) as port, connected(port, limit=1 << 12) as peer:
        peer.send(f"GET /flood {HOST}")
        await asyncio.wait_for(handlers.left.wait(), 5)
        assert len(handlers.order) < 400


async def test_a_whole_answer_that_nobody_reads_is_given_up() -> None:
    async with running(Handlers(), QUICK, drain_seconds=PATIENT) as port:
        async with connected(port, limit=1 << 12) as peer:
            body = b"x" * 30_000_000
            peer.send(f"POST /echo {HOST}\nconnection: close\ncontent-length: {len(body)}")
            peer.writer.write(body)
            await asyncio.wait_for(peer.writer.drain(), 5)
            begun = monotonic()
            connection = peer.writer.get_extra_info("socket")
            # Asked of the socket: who reads to find out is a reader.
            while not (error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
                assert monotonic() - begun < PATIENT
                await asyncio.sleep(0.02)
            assert error == errno.ECONNRESET


async def test_a_slow_reader_that_goes_on_reading_gets_the_whole_answer() -> None:
    handlers = Handlers()
    # Longer than a busy machine keeps the reader waiting.
    limits = replace(QUICK, progress_seconds=0.6)
    async with running(handlers, limits) as port, connected(port, limit=1 << 12) as peer:
        peer.send(f"GET /flood {HOST}\nconnection: close")
        begun, size = monotonic(), 0
        while piece := await asyncio.wait_for(peer.reader.read(1 << 17), 5):
            size += len(piece)
            await asyncio.sleep(0.01)
        assert size > 400 << 16
        assert monotonic() - begun > 2 * limits.progress_seconds


async def test_a_handler_that_takes_long_has_no_deadline_of_ours() -> None:
    handlers = Handlers()
    async with talking(handlers, QUICK) as peer:
        peer.send(f"GET /wait {HOST}")
        await asyncio.sleep(0.6)
        handlers.released.set()
        assert (await peer.response())[1] == b"released"


async def test_a_refused_client_that_goes_on_sending_is_cut_off() -> None:
    async with talking(Handlers(), QUICK) as peer:
        peer.writer.write(b"nonsense\r\n\r\n")
        assert (await peer.head()).startswith("http/1.1 400 ")
        until = monotonic() + 5
        while not peer.writer.transport.is_closing() and monotonic() < until:
            peer.writer.write(b"x")
            await asyncio.sleep(0.02)
        assert monotonic() < until


# Connections


async def test_connections_that_come_at_once_each_take_the_place_of_another() -> None:
    async with running(Handlers(), ServerLimits(connections=3)) as port:
        async with AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(connected(port)) for _ in range(3)]
            await asyncio.sleep(0.05)
            # Without a turn of the event loop in between, so that the server sees all at once.
            late = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)
            ]
            await asyncio.sleep(0.2)
            assert [await peer.cut(0.05) for peer in peers] == [True, True, True]
            for one in late:
                one.sendall(b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(0.2)
            assert [one.recv(15) for one in late] == [b"HTTP/1.1 200 OK"] * 3


async def test_past_the_number_of_connections_the_longest_idle_one_is_closed() -> None:
    limits = ServerLimits(connections=3, sweep_seconds=0.02)
    async with running(Handlers(), limits) as port, AsyncExitStack() as stack:
        peers = []
        for _ in range(5):
            peers.append(await stack.enter_async_context(connected(port)))
            peers[-1].send(f"GET /echo {HOST}")
            await peers[-1].response()
            await asyncio.sleep(0.06)
        assert [await peer.cut(0.05) for peer in peers] == [True, True, False, False, False]


async def test_a_connection_in_use_is_never_closed_for_another() -> None:
    limits = ServerLimits(connections=2)
    handlers = Handlers()
    async with running(handlers, limits) as port, AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(connected(port)) for _ in range(2)]
        for peer in busy:
            peer.send(f"GET /wait {HOST}")
        await asyncio.wait_for(handlers.begun.wait(), 2)
        await asyncio.sleep(0.05)
        async with connected(port) as late:
            assert (await late.rest()).startswith(b"HTTP/1.1 503 ")
        handlers.released.set()
        assert [(await peer.response())[1] for peer in busy] == [b"released"] * 2
        async with connected(port) as later:
            later.send(f"GET /echo {HOST}")
            assert (await later.response())[0].startswith("http/1.1 200")


def test_half_of_the_descriptors_stay_free_for_everything_else() -> None:
    assert connections_within(65_536, 4096, 2) == 4096
    assert connections_within(1024, 4096, 2) == (1024 - RESERVED_DESCRIPTORS) // 4
    assert connections_within(64, 4096, 2) == 16


LOW = """
import resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
from lockstep.http.server.limits import raise_descriptor_limit
raised = raise_descriptor_limit()
assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0], raised
assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
print(raised, hard)
"""


def test_a_server_raises_its_limit_of_open_files() -> None:
    out = subprocess.run([sys.executable, "-c", LOW], check=True, capture_output=True, text=True)
    raised, hard = map(int, out.stdout.split())
    assert raised == (min(hard, 1 << 16) if hard > 0 else 1 << 16)


async def test_a_response_that_fits_the_buffer_and_is_read_byte_by_byte_is_cut() -> None:
    """What the kernel does not take waits in the process, below the size that pauses writing."""

    async def respond(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 40_000})

    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    config = ListenerConfig(respond, replace(QUICK, keep_alive_seconds=3600.0))
    config.load()
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_accepted_socket(
        lambda: HttpProtocol(config, ServerState(), {}), ours
    )
    reader, writer = await asyncio.open_connection(sock=theirs, limit=1)
    writer.write(f"GET / {HOST}\n\n".replace("\n", "\r\n").encode())
    deadline = monotonic() + PATIENT
    while not transport.is_closing():
        assert monotonic() < deadline, "the connection is not cut"
        await reader.read(1)
        protocol.sweep(loop.time())
        await asyncio.sleep(0.005)
    writer.close()
