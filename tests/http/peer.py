"""Handlers on a real listener, and a client that sends bytes as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lockstep.http.handlers import EXCEPTION_HANDLERS, EventStream
from lockstep.http.http_request import read_json, unless_gone
from lockstep.http.server.limits import DRAIN_SECONDS, LIMITS, ServerLimits
from lockstep.http.server.server import listen, serving

HOST = "HTTP/1.1\nhost: x"
NAMES = (
    "echo", "headers", "wait", "named", "limited", "pieces", "events", "flood", "broken", "torn",
    "secret", "stubborn",
)  # fmt: skip


@dataclass
class Handlers:
    """Routes, and what happened to them."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    order: list[str] = field(default_factory=list)

    async def echo(self, http: Request) -> Response:
        body = await http.body()
        self.order.append("echo")
        return PlainTextResponse(body, headers={"x-query": str(http.query_params)})

    async def headers(self, http: Request) -> Response:
        """The headers as they are after the whole body has come."""
        await http.body()
        return JSONResponse([[name, value] for name, value in http.headers.items()])

    async def wait(self, http: Request) -> Response:
        await http.body()
        self.begun.set()
        try:
            await unless_gone(http, self.released.wait())
        except BaseException:
            self.left.set()
            raise
        return PlainTextResponse("released")

    async def named(self, http: Request) -> Response:
        name = http.query_params["name"]
        await asyncio.sleep(0.1 if name == "first" else 0)
        self.order.append(name)
        return PlainTextResponse(name)

    async def limited(self, http: Request) -> Response:
        try:
            return Response(await read_json(http, 1000))
        except Exception as error:
            self.order.append(type(error).__name__)
            raise

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
            try:
                for number in range(400):
                    self.order.append(str(number))
                    yield b"x" * (1 << 16)
            finally:
                self.left.set()

        return EventStream(some())

    async def broken(self, _: Request) -> Response:
        async def some() -> AsyncIterator[bytes]:
            yield b"a part"
            raise ValueError("broken on purpose")

        return StreamingResponse(some())

    async def torn(self, _: Request) -> Response:
        return PlainTextResponse("", headers={"x-bad": "one\r\nset-cookie: two"})

    async def secret(self, _: Request) -> Response:
        raise ValueError("the password is swordfish")

    async def stubborn(self, _: Request) -> Response:
        self.begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.left.set()
        return PlainTextResponse("")


class Peer:
    """A client that sends bytes as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, head: str, body: bytes = b"") -> None:
        self.writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)

    async def head(self) -> str:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)
        return raw.decode().lower()

    async def response(self) -> tuple[str, bytes]:
        head = await self.head()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return head, await asyncio.wait_for(self.reader.readexactly(length), 5)

    async def rest(self, seconds: float = 5) -> bytes:
        return await asyncio.wait_for(self.reader.read(), seconds)

    async def cut(self, seconds: float = 5) -> bool:
        """Whether the server ends the connection in so many seconds."""
        try:
            await self.rest(seconds)
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


def application(handlers: Handlers) -> Starlette:
    return Starlette(
        routes=[Route(f"/{name}", getattr(handlers, name), methods=["GET", "POST"])
                for name in NAMES],
        exception_handlers=EXCEPTION_HANDLERS,
    )  # fmt: skip


@asynccontextmanager
async def running(
    handlers: Handlers,
    limits: ServerLimits = LIMITS,
    drain_seconds: float = DRAIN_SECONDS,
) -> AsyncIterator[int]:
    app = application(handlers)
    with listen("127.0.0.1", 0) as sock:
        async with serving([(app, sock)], drain_seconds=drain_seconds, limits=limits):
            yield sock.getsockname()[1]


@asynccontextmanager
async def connected(port: int, **options: int) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()


@asynccontextmanager
async def talking(handlers: Handlers, limits: ServerLimits = LIMITS) -> AsyncIterator[Peer]:
    async with running(handlers, limits) as port, connected(port) as peer:
        yield peer
