"""One request to an ASGI application and its answer, on the connection they came by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.types import Message, Scope

if TYPE_CHECKING:
    from lockstep.wire.asgi import ServerConnection

log = logging.getLogger(__name__)
GONE = "lockstep.gone"
"""An extension in the scope: takes what to call when the client has gone, or None for nothing."""
BODY_HELD = 1 << 18
"""Bytes of a body that may wait for the application before the client has to."""
STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
UNSENT = 1 << 16
"""Bytes of an answer that may be collected into one write."""
BODILESS = (204, 304)


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


class Exchange:
    """One request and its answer: the `receive` and `send` of the application."""

    __slots__ = (
        "_body", "_chunked", "_connection", "_continue", "_gone", "_held", "_on_gone", "_read",
        "_scope", "_unsent", "_unsent_bytes", "_waiter", "body_open", "done", "kept", "task",
    )  # fmt: skip

    def __init__(self, connection: ServerConnection, scope: Scope, kept: bool) -> None:
        self._connection = connection
        self._scope = scope
        self.kept = kept
        self._continue = any(
            name == b"expect" and value.lower() == b"100-continue"
            for name, value in scope["headers"]
        )
        self._body: list[bytes] = []
        self._held = 0
        self.body_open = True
        self._waiter: asyncio.Future[None] | None = None
        self._gone = False
        self._on_gone: Callable[[], object] | None = None
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._read = self._chunked = self.done = False

    def start(self) -> None:
        self.task = self._connection.loop.create_task(self._run())

    def add(self, piece: bytes) -> None:
        if self.done:
            return  # the answer did not need it, but the next request comes after it
        self._body.append(piece)
        self._held += len(piece)
        if self._held > BODY_HELD:
            self._connection.pause_reading()
        self._wake()

    def add_end(self) -> None:
        self.body_open = False
        self._wake()
        if self.done:
            self._connection.finished(self)

    def leave(self) -> None:
        """The client has gone."""
        self._gone = True
        self._wake()
        if self._on_gone is not None:
            self._on_gone()

    def when_gone(self, call: Callable[[], object] | None) -> None:
        """Has `call` called when the client goes, or now if it has gone."""
        self._on_gone = call
        if self._gone and call is not None:
            call()

    async def _run(self) -> None:
        try:
            await self._connection.listener.app(self._scope, self.receive, self.send)
        except Exception:
            if not self.done:
                log.exception("%s %s failed", self._scope["method"], self._scope["path"])
        finally:
            if not self.done and not self._gone:
                # Nobody may take a part of an answer for the whole.
                self._connection.transport.abort()
            self._connection.finished(self)

    async def receive(self) -> Message:
        if not self._read:
            while not self._body and self.body_open and not self._gone:
                if self._continue:
                    self._continue = False
                    self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await self._news()
            if self._body or not self.body_open:
                body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
                self._body.clear()
                self._held = 0
                self._read = not self.body_open
                self._connection.resume_reading()
                return {"type": "http.request", "body": body, "more_body": self.body_open}
        while not self._gone and not self.done:
            await self._news()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._gone or self.done:
            return
        if message["type"] == "http.response.start":
            self._write(self._head_of(message["status"], message["headers"]))
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._chunked:
            if body:
                self._write(b"%x\r\n%b\r\n" % (len(body), body))
            if not more:
                self._write(b"0\r\n\r\n")
        elif body and self._scope["method"] != "HEAD":
            self._write(body)
        if not more:
            self._flush()
            self.done = True
            self._body.clear()
            self._wake()
        await self._connection.drain()

    def _write(self, piece: bytes) -> None:
        """Writes soon: what the application sends without waiting in between goes out at once."""
        if not self._unsent:
            self._connection.loop.call_soon(self._flush)
        self._unsent.append(piece)
        self._unsent_bytes += len(piece)
        if self._unsent_bytes > UNSENT:
            self._flush()

    def _flush(self) -> None:
        if self._unsent and not self._gone:
            self._connection.transport.writelines(self._unsent)
        self._unsent, self._unsent_bytes = [], 0

    def _head_of(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The status line and the headers. Raises ValueError for a header that would be two."""
        connection = self._connection
        lines = [status_line(status)]
        lines.append(connection.listener.date())
        sized = False
        for name, value in headers:
            sized = sized or name == b"content-length"
            lines.append(b"%b: %b\r\n" % (name, value))
        if not sized and status not in BODILESS and self._scope["method"] != "HEAD":
            if self._scope["http_version"] == "1.0":
                self.kept = False  # such a client takes the end of the connection for the end
            else:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if connection.listener.ending:
            self.kept = False
        if not self.kept:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a header of the answer holds a line break")
        return head

    async def _news(self) -> None:
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
