"""HTTP/1.1 for an ASGI application: one connection, its requests one after the other.

What the general servers do for every application is left out here, because it is most of the time
a request takes: proxies' headers, websockets, access logs. A handler can have its task cancelled
when the client goes away (exchange.GONE), which spares it a second task that waits for that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from email.utils import formatdate
from time import monotonic, time
from typing import cast
from urllib.parse import unquote_to_bytes

import httptools
from starlette.types import ASGIApp, Scope

from lockstep.wire.exchange import GONE, Exchange, status_line

KEEP_ALIVE = 75.0
"""Seconds a connection may be without a request; also for the head of one to come."""
HEAD_LIMIT = 128 << 10
POLL_SECONDS = 0.01


class Listener:
    """The connections to one application, and whether they may go on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.connections: set[ServerConnection] = set()
        self.ending = False
        self._date = (0, b"")

    def connect(self) -> ServerConnection:
        return ServerConnection(self)

    def date(self) -> bytes:
        """The date header, written anew once a second."""
        now = int(time())
        if self._date[0] != now:
            self._date = now, f"date: {formatdate(now, usegmt=True)}\r\n".encode()
        return self._date[1]

    def sweep(self) -> None:
        """Closes the connections that have been without a request for too long."""
        since = monotonic() - KEEP_ALIVE
        for connection in list(self.connections):
            if connection.idle and connection.idle_since < since:
                connection.transport.close()

    async def end(self, seconds: float) -> None:
        """Takes no more requests; what has not been answered after `seconds` is cancelled."""
        self.ending = True
        deadline = monotonic() + seconds
        for connection in list(self.connections):
            if connection.idle:
                connection.transport.close()
        running = [one.exchange.task for one in self.connections if one.exchange is not None]
        if running:
            _, late = await asyncio.wait(running, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        while self.connections and monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)  # clients are still reading their answers
        for connection in list(self.connections):
            connection.transport.abort()


class ServerConnection(asyncio.Protocol):
    """One client. Requests that it sends before their turn wait, and so does it."""

    transport: asyncio.Transport

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.exchange: Exchange | None = None
        self.idle_since = monotonic()
        self.lost = False
        self._parser = httptools.HttpRequestParser(self)
        self._parsed: Exchange | None = None
        self._waiting: deque[Exchange] = deque()
        self._target = b""
        self._head_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head = False
        self._reading = True
        self._drained: asyncio.Future[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no answer is under way."""
        return self.exchange is None or self.exchange.done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.loop = asyncio.get_running_loop()
        self._server = self._address("sockname")
        self._client = self._address("peername")
        self.listener.connections.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = True
        self.listener.connections.discard(self)
        self.resume_writing()
        for exchange in (self._parsed, self.exchange):
            if exchange is not None:
                exchange.leave()
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # refused where its headers were read
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is no HTTP request: {error}")
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT:
                self._refuse(431, f"the head of a request is larger than {HEAD_LIMIT} bytes")

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = self.loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None:
            if not self._drained.done():
                self._drained.set_result(None)
            self._drained = None

    async def drain(self) -> None:
        """Returns when the client has read enough of what was written."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def on_message_begin(self) -> None:
        self._target, self._headers, self._head_bytes, self._in_head = b"", [], 0, True

    def on_url(self, target: bytes) -> None:
        self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser = self._parser
        if parser.should_upgrade():
            self._refuse(400, "other protocols than HTTP/1.1 are not spoken here")
            return
        try:
            target = httptools.parse_url(self._target)
        except httptools.HttpParserInvalidURLError:
            self._refuse(400, "the target of the request is no URL")
            return
        raw_path = target.path or b"/"
        path = unquote_to_bytes(raw_path) if b"%" in raw_path else raw_path
        version = parser.get_http_version()
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": path.decode("utf-8", "replace"),
            "raw_path": raw_path,
            "query_string": target.query or b"",
            "root_path": "",
            "headers": self._headers,
            "server": self._server,
            "client": self._client,
        }
        exchange = Exchange(self, scope, version == "1.1" and parser.should_keep_alive())
        scope["extensions"] = {GONE: exchange.when_gone}
        self._parsed = exchange
        if self.exchange is None:
            self.exchange = exchange
            exchange.start()
        else:
            self._waiting.append(exchange)
            self.pause_reading()

    def on_body(self, piece: bytes) -> None:
        if self._parsed is not None:
            self._parsed.add(piece)

    def on_message_complete(self) -> None:
        if self._parsed is not None:
            self._parsed.add_end()
            self._parsed = None

    def finished(self, exchange: Exchange) -> None:
        """The answer is written: goes on to the next request once this one was read to its end."""
        self.idle_since = monotonic()
        if self.lost or exchange is not self.exchange:
            return
        if exchange.body_open:
            self.resume_reading()
            return
        if not exchange.kept or self.listener.ending:
            self.transport.close()
            return
        self.exchange = self._waiting.popleft() if self._waiting else None
        if self.exchange is not None:
            self.exchange.start()
        if not self._waiting:
            self.resume_reading()

    def pause_reading(self) -> None:
        if self._reading and not self.lost:
            self._reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self.lost and not self._waiting:
            self._reading = True
            self.transport.resume_reading()

    def _refuse(self, status: int, why: str) -> None:
        """Answers what cannot be read, unless an answer is under way, and hangs up."""
        if not self.transport.is_closing():
            if self.exchange is None:
                body = why.encode()
                self.transport.write(
                    status_line(status)
                    + b"content-type: text/plain\r\nconnection: close\r\ncontent-length: "
                    + b"%d\r\n\r\n%b" % (len(body), body)
                )
            self.transport.close()

    def _address(self, which: str) -> tuple[str, int] | None:
        found = self.transport.get_extra_info(which)
        return (found[0], found[1]) if isinstance(found, tuple) else None
