"""A keep-alive HTTP/1.1 connection: one request at a time, and its response as it arrives."""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

HEAD_LIMIT = 64 << 10
HELD = 1 << 18
"""Bytes of a response that are buffered before reading pauses: as many as one read of a socket
returns.
"""


class Lost(Exception):
    """The connection ended, or its data was not HTTP, before the response was complete."""


class Connection(asyncio.Protocol):
    """A connection that sends a request and reports the progress of its response.

    `began` is true from the first byte of the response, `status` is 0 until the head has arrived,
    `ended` is true from the last byte. The body is taken as it arrives; data that is not taken
    makes the server wait.
    """

    def __init__(self) -> None:
        self.began, self.status, self.ended = False, 0, True
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._held = self._head = 0
        self._sized = self._kept = True
        self._paused = False
        self._lost: str | None = None
        self._late = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent: the last one is complete, no data of its response is
        left that the next one would read, and neither side has closed the connection.
        """
        return (
            self.ended
            and not self._pieces
            and self._kept
            and self._lost is None
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    def send(self, head: bytes, body: bytes | None) -> None:
        """Write a request; the connection must be `reusable`."""
        self.began, self.status, self.ended = False, 0, False
        self._head, self._sized, self._late = 0, False, False
        self._transport.writelines((head, body) if body else (head,))

    async def news(self) -> None:
        """Wait until more has arrived: the head, a piece of the body, or the end. Raises Lost, and
        TimeoutError once the response has expired.
        """
        if self._lost is not None:
            raise Lost(self._lost)
        if self._late:
            raise TimeoutError
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._lost is not None and not self.ended:
            raise Lost(self._lost)

    def expire(self) -> None:
        """End the time of the response: a current or later wait for it raises TimeoutError. A
        caller that still processes received data is not interrupted.
        """
        self._late = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def take(self) -> list[bytes]:
        """Return the pieces of the body that arrived since the last call."""
        pieces, self._pieces, self._held = self._pieces, [], 0
        if self._paused and self._lost is None:
            self._paused = False
            self._transport.resume_reading()
        return pieces

    def close(self) -> None:
        """Close the connection at once, so that a server that still works on the request
        notices.
        """
        self._fail("the client closed the connection")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        if self.ended:
            self._fail("the server sent data without a request")
            return
        self.began = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the server switched to another protocol")
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")
        if not self.status:
            self._head += len(data)
            if self._head > HEAD_LIMIT:
                self._fail(f"the head of the response is larger than {HEAD_LIMIT} bytes")
        elif self._held > HELD and not self._paused and self._lost is None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self.status and not self._sized and error is None:
            self.ended = True  # a body without a length ends with its connection
        self._fail("the server hung up" if error is None else f"{type(error).__name__}: {error}")

    def on_message_begin(self) -> None:
        if self.ended:
            self._kept = False  # more data came than was requested

    def on_header(self, name: bytes, value: bytes) -> None:
        field = name.lower()
        if field in (b"content-length", b"transfer-encoding"):
            self._sized = True
        elif field == b"content-encoding" and value.lower() != b"identity":
            self._fail(f"the response has content-encoding {value!r}, which was not accepted")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self.ended and self._lost is None:
            self.status = status
            self._kept = self._parser.should_keep_alive()

    def on_body(self, piece: bytes) -> None:
        if not self.ended:
            self._pieces.append(piece)
            self._held += len(piece)

    def on_message_complete(self) -> None:
        if self.status:  # an informational head (1xx) comes before the real one
            self.ended = True

    def _fail(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            self._transport.abort()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
