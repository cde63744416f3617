"""HTTP/1.1 for the faces: framing, pipelining, clients that leave, limits and a clean end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from lockstep.wire.asgi import HEAD_LIMIT
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lockstep.http.handlers import EXCEPTION_HANDLERS, EventStream, read_json, unless_gone
from lockstep.http.server import listen, serving
from lockstep.wire import asgi, server


@dataclass
class Faces:
    """Handlers, and what happened to them."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    order: list[str] = field(default_factory=list)

    async def echo(self, http: Request) -> Response:
        body = await http.body()
        return PlainTextResponse(body, headers={"x-query": str(http.query_params)})

    async def wait(self, http: Request) -> Response:
        await http.body()
        self.begun.set()
        try:
            await unless_gone(http, self.released.wait())
        except BaseException:
            self.left.set()
            raise
        return PlainTextResponse("released")

    async def slow_then_fast(self, http: Request) -> Response:
        name = http.query_params["name"]
        await asyncio.sleep(0.05 if name == "first" else 0)
        self.order.append(name)
        return PlainTextResponse(name)

    async def limited(self, http: Request) -> Response:
        return Response(await read_json(http, 1000))

    async def pieces(self, _: Request) -> Response:
        async def some() -> AsyncIterator[bytes]:
            yield b"one "
            yield b"two"

        return StreamingResponse(some())

    async def events(self, _: Request) -> Response:
        async def some() -> AsyncIterator[bytes]:
            try:
                yield b"data: 1\n\n"
                self.begun.set()
                await self.released.wait()
            finally:
                self.left.set()

        return EventStream(some())

    async def flood(self, _: Request) -> Response:
        async def some() -> AsyncIterator[bytes]:
            for number in range(2000):
                self.order.append(str(number))
                yield b"x" * (1 << 16)

        return StreamingResponse(some())

    async def broken(self, _: Request) -> Response:
        async def some() -> AsyncIterator[bytes]:
            yield b"a part"
            raise ValueError("broken on purpose")

        return StreamingResponse(some())

    async def torn(self, _: Request) -> Response:
        return PlainTextResponse("", headers={"x-bad": "one\r\nset-cookie: two"})


class Peer:
    """A client that sends bytes as they are given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, head: str, body: bytes = b"") -> None:
        self.writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)

    async def head(self) -> str:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)
        return raw.decode().lower()

    async def answer(self) -> tuple[str, bytes]:
        head = await self.head()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return head, await asyncio.wait_for(self.reader.readexactly(length), 5)

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 5)


@asynccontextmanager
async def running(faces: Faces) -> AsyncIterator[int]:
    app = Starlette(
        routes=[
            Route(f"/{name}", getattr(faces, name), methods=["GET", "POST"])
            for name in ("echo", "wait", "slow_then_fast", "limited", "pieces", "events", "flood",
                         "broken", "torn")
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )  # fmt: skip
    with listen("127.0.0.1", 0) as sock:
        async with serving([(app, sock)]):
            yield sock.getsockname()[1]


@asynccontextmanager
async def talking(faces: Faces) -> AsyncIterator[Peer]:
    async with running(faces) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield Peer(reader, writer)
        finally:
            writer.close()


HOST = "HTTP/1.1\nhost: x"


async def test_a_connection_is_kept_from_one_request_to_the_next() -> None:
    async with talking(Faces()) as peer:
        for body in (b"one", b"", b"three"):
            peer.send(f"POST /echo?a=b%20c {HOST}\ncontent-length: {len(body)}", body)
            head, came = await peer.answer()
            assert head.startswith("http/1.1 200 ok\r\n")
            assert "x-query: a=b+c" in head
            assert "date: " in head
            assert came == body


async def test_a_body_may_come_in_chunks_and_byte_by_byte() -> None:
    async with talking(Faces()) as peer:
        raw = f"POST /echo {HOST}\ntransfer-encoding: chunked\n\n".replace("\n", "\r\n").encode()
        for byte in raw + b"4\r\nfour\r\n3\r\nsix\r\n0\r\n\r\n":
            peer.writer.write(bytes([byte]))
            await peer.writer.drain()
        assert (await peer.answer())[1] == b"foursix"


async def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    faces = Faces()
    async with talking(faces) as peer:
        for name in ("first", "second", "third"):
            peer.send(f"GET /slow_then_fast?name={name} {HOST}")
        assert [(await peer.answer())[1] for _ in range(3)] == [b"first", b"second", b"third"]
        assert faces.order == ["first", "second", "third"]


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with talking(Faces()) as peer:
        peer.send(f"POST /echo {HOST}\nexpect: 100-continue\ncontent-length: 2")
        assert (await peer.head()).startswith("http/1.1 100 ")
        peer.writer.write(b"ok")
        assert (await peer.answer())[1] == b"ok"


async def test_an_answer_without_a_length_comes_in_chunks() -> None:
    async with talking(Faces()) as peer:
        peer.send(f"GET /pieces {HOST}\nconnection: close")
        head = await peer.head()
        assert "transfer-encoding: chunked" in head
        assert await peer.rest() == b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_an_old_client_gets_the_end_of_the_connection_as_the_end() -> None:
    async with talking(Faces()) as peer:
        peer.send("GET /pieces HTTP/1.0")
        assert "connection: close" in await peer.head()
        assert await peer.rest() == b"one two"


async def test_head_has_no_body() -> None:
    async with talking(Faces()) as peer:
        peer.send(f"HEAD /echo {HOST}\nconnection: close")
        assert (await peer.head()).startswith("http/1.1 200")
        assert await peer.rest() == b""


@pytest.mark.failure_mode("F47")
async def test_a_handler_is_cancelled_when_its_client_leaves() -> None:
    faces = Faces()
    async with talking(faces) as peer:
        peer.send(f"GET /wait {HOST}")
        await asyncio.wait_for(faces.begun.wait(), 2)
        peer.writer.close()
        await asyncio.wait_for(faces.left.wait(), 2)


async def test_a_stream_is_closed_when_its_client_leaves() -> None:
    faces = Faces()
    async with talking(faces) as peer:
        peer.send(f"GET /events {HOST}")
        await asyncio.wait_for(faces.begun.wait(), 2)
        peer.writer.close()
        await asyncio.wait_for(faces.left.wait(), 2)


async def test_the_head_of_a_stream_does_not_wait_for_its_first_event() -> None:
    faces = Faces()
    async with talking(faces) as peer:
        peer.send(f"GET /events {HOST}")
        assert "text/event-stream" in await peer.head()
        faces.released.set()
        assert (await asyncio.wait_for(peer.reader.readuntil(b"0\r\n\r\n"), 2)).count(b"data:") == 2


async def test_a_client_that_does_not_read_makes_the_handler_wait() -> None:
    faces = Faces()
    async with talking(faces) as peer:
        peer.send(f"GET /flood {HOST}")
        await asyncio.sleep(0.3)
        assert 0 < len(faces.order) < 1000


async def test_a_refused_body_is_read_over_so_that_the_refusal_arrives() -> None:
    async with talking(Faces()) as peer:
        peer.send(f"POST /limited {HOST}\ncontent-length: 3000000", b"x" * 1_500_000)
        head, _ = await peer.answer()
        assert head.startswith("http/1.1 413")
        peer.writer.write(b"x" * 1_500_000)
        peer.send(f"GET /echo {HOST}")
        assert (await peer.answer())[0].startswith("http/1.1 200")
    async with talking(Faces()) as peer:
        peer.send(f"POST /limited {HOST}\nconnection: close\ncontent-length: 3000000", b"x" * 2000)
        await asyncio.sleep(0.1)
        peer.writer.write(b"x" * 2_998_000)
        await peer.writer.drain()
        assert (await peer.rest()).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("sent", [
    b"nonsense\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\n\r\n",
    b"POST /echo HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /echo HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
])  # fmt: skip
async def test_what_cannot_be_read_for_sure_is_refused(sent: bytes) -> None:
    async with talking(Faces()) as peer:
        peer.writer.write(sent)
        assert (await peer.rest()).startswith(b"HTTP/1.1 400 ")


async def test_a_broken_chunk_never_passes_for_a_body() -> None:
    async with talking(Faces()) as peer:
        peer.send(f"POST /echo {HOST}\ntransfer-encoding: chunked", b"5\r\nhello\r\nnonsense\r\n")
        assert b"hello" not in await peer.rest()


async def test_a_head_without_end_is_cut_off() -> None:
    async with talking(Faces()) as peer:
        peer.writer.write(b"GET /echo HTTP/1.1\r\nx-long: " + b"x" * (HEAD_LIMIT + 1))
        assert (await peer.rest()).startswith(b"HTTP/1.1 431 ")


async def test_an_answer_that_breaks_off_is_not_ended_like_a_whole_one() -> None:
    async with talking(Faces()) as peer:
        peer.send(f"GET /broken {HOST}")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(peer.reader.readuntil(b"0\r\n\r\n"), 2)


async def test_a_header_cannot_smuggle_in_another() -> None:
    async with talking(Faces()) as peer:
        peer.send(f"GET /torn {HOST}")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await peer.head()


async def test_idle_connections_and_half_a_head_are_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi, "KEEP_ALIVE", 0.05)
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.05)
    async with talking(Faces()) as peer:
        peer.writer.write(b"GET /echo HTT")
        assert await peer.rest() == b""


async def test_the_end_waits_for_open_answers_and_takes_no_new_ones() -> None:
    faces = Faces()
    async with running(faces) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        peer = Peer(reader, writer)
        peer.send(f"GET /wait {HOST}")
        await asyncio.wait_for(faces.begun.wait(), 2)
        asyncio.get_running_loop().call_later(0.1, faces.released.set)
    head, body = await peer.answer()
    assert body == b"released"
    assert "connection: close" in head
    assert await idle.read() == b""
    writer.close()
    idle_writer.close()


async def test_the_end_waits_for_clients_that_still_read() -> None:
    async with running(Faces()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        body = b"x" * 20_000_000
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 20000000\r\n\r\n" + body)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        reading = asyncio.create_task(reader.readexactly(len(body)))
    assert await asyncio.wait_for(reading, 5) == body
    writer.close()


async def test_the_end_cancels_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DRAIN_SECONDS", 0.05)
    faces = Faces()
    async with running(faces) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(faces.begun.wait(), 2)
    assert faces.left.is_set()
    writer.close()
