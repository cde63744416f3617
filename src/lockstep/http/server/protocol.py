"""HTTP/1.1 on one connection: uvicorn's protocol, with the limits and deadlines that it lacks.

Added: headers end with the head; head, trailers and chunk extensions have a maximum size; head,
body and unread responses have deadlines; exactly one Host header; `Upgrade` is ignored; no request
of a refused connection runs; a handler is notified at once when its client disconnects, also while
requests are pipelined.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from lockstep.http.http_request import GONE, Presence
from lockstep.http.server.closing import has_left, last_response, refusal, reset
from lockstep.http.server.coalescing import CoalescingTransport
from lockstep.http.server.limits import ServerLimits

CHUNK_FRAME = 12
"""Bytes around each chunk that do not count: its size in up to eight digits, and two line ends."""
HEAD_PIECE, CHUNK_PIECE = 4 << 10, 16 << 10
"""Bytes that are parsed at once, as they may hold many requests; a body is taken as a whole."""
UPGRADE_HEADERS = (b"upgrade", b"http2-settings", b"connection")
LINE_BREAK = re.compile(rb"[\r\n\0]")


class ListenerConfig(uvicorn.Config):
    """uvicorn's settings of one listener, with Lockstep's limits."""

    def __init__(self, app: Any, limits: ServerLimits) -> None:
        super().__init__(
            app,
            http=HttpProtocol,
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=2048,
        )
        self.limits = limits


class HeldFlow(FlowControl):
    """uvicorn's flow control with a hold: reading is not resumed while it is held.

    A handler resumes reading for more of its body, which would also read more of the requests that
    a client sends ahead.
    """

    held = False

    def hold(self, held: bool) -> None:
        """Stop reading, or allow it again; a reader that paused by itself resumes by itself."""
        if held:
            self.held = True
            self.pause_reading()
        elif self.held:
            self.held = False
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """The connection of one client. Its requests are handled one after the other, in order."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = cast(ListenerConfig, config).limits
        self._running: RequestResponseCycle | None = None
        self._last: RequestResponseCycle | None = None
        self._presence = Presence()
        self._pipelined = bytearray()
        self._refusal: bytes | None = None
        # Once this is set, further data of the client is read and dropped.
        self._ignores_input = self._in_head = self._in_body = False
        self._messages = self._hosts = 0
        self._head_size = self._head_fed = self._framing = self._received = self._body_left = 0
        self._resumed = 0
        self._watched: tuple[str, int, int] = ("idle", 0, 0)
        self._watched_since = self.loop.time()
        self._progress = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        joined = CoalescingTransport(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, joined))
        self.flow: HeldFlow = HeldFlow(cast(asyncio.Transport, joined))
        if len(self.connections) > self.limits.connections:
            self._close_one()

    def connection_lost(self, exc: Exception | None) -> None:
        self.pipeline.clear()
        self._pipelined.clear()
        self._ignores_input = True
        super().connection_lost(exc)
        self._leave()

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        rest: bytes | memoryview = data
        if not self._in_body and not self._pipelined and not self._waits():
            # Parse the first piece as below; the rest is mostly its body.
            view = memoryview(data)
            self._feed(view[:HEAD_PIECE])
            rest = view[HEAD_PIECE:]
            if not rest or self._ignores_input:
                return
        whole = self._in_body and len(rest) <= max(self._body_left, CHUNK_PIECE)
        if whole and not (self._pipelined or self._waits()):
            self._feed(rest)
            return
        # Keep the data as bytes: reading continues, so that a disconnect is noticed.
        self._pipelined += rest
        self._feed_pipelined()

    def resume_writing(self) -> None:
        self._resumed += 1
        super().resume_writing()

    def shutdown(self) -> None:
        """Finish the running response, then close the connection."""
        self.pipeline.clear()
        self._pipelined.clear()
        if self._running is None:
            self.transport.close()
        else:
            self._running.keep_alive = False

    @property
    def idle(self) -> bool:
        """Whether the client neither waits for a response nor is sending a request."""
        return self._running is None and not (self._in_head or self._in_body or self._ignores_input)

    def _close_one(self) -> None:
        """Close the connection that was idle for longest, or else this one."""
        idle = [
            other
            for other in cast("set[HttpProtocol]", self.connections)
            if other is not self and other.idle
        ]
        if idle:
            leaving = min(idle, key=lambda other: other._watched_since)
        else:
            leaving = self
            self._ignores_input = True
            many = f"{self.limits.connections} connections are open here, and all are in use"
            self.transport.write(refusal(503, f"{many}: try again later", "too_many_connections"))
        # Uncount it now: several connections may be opened before the event loop has closed it.
        self.connections.discard(leaving)
        leaving.transport.close()

    # Reading requests

    def _waits(self) -> bool:
        """Whether incoming data belongs to a request that must wait for an earlier one."""
        running = self._running
        return running is not None and (running is not self.cycle or not self._in_body)

    def _feed_pipelined(self) -> None:
        """Parse received data up to a request that must wait for an earlier one.

        It is parsed in small pieces: all requests of one piece are parsed at once, and each takes
        far more memory than its bytes.
        """
        while self._pipelined and not self._ignores_input and not self._waits():
            size = max(self._body_left, CHUNK_PIECE) if self._in_body else HEAD_PIECE
            piece = bytes(self._pipelined[:size])
            del self._pipelined[:size]
            self._feed(piece)
        self.flow.hold(len(self._pipelined) > self.limits.pipelined_bytes)

    def _feed(self, data: bytes | memoryview) -> None:
        in_head, in_body, messages = self._in_head, self._in_body, self._messages
        received = self._received
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is not an HTTP request: {error}", "bad_request")
            return
        # The parser does not report unfinished headers and chunk extensions. Their size is that of
        # the bytes fed during one part of one request, less what it reported.
        limits = self.limits
        if self._in_head and (in_head or (not in_body and self._messages == messages + 1)):
            self._head_fed += len(data)
            if self._head_fed > limits.head_bytes:
                self._refuse_head()
        elif self._in_body and in_body and self._messages == messages:
            self._framing += len(data) - (self._received - received)
            if self._framing > limits.framing_bytes:
                limit = f"larger than {limits.framing_bytes} bytes"
                why = f"the trailers and chunk extensions of a body are {limit}"
                self._refuse(431, why, "trailers_too_large")

    def _feed_without_upgrade(self, rest: bytes | memoryview) -> None:
        """Handle a request that asks for another protocol as a plain HTTP/1.1 request."""
        if self._ignores_input:
            return
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(405, "CONNECT is not served here", "method_not_allowed")
            return
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if LINE_BREAK.search(value):
                self._refuse(400, f"the header {name!r} holds a line break", "bad_request")
                return
            if name not in UPGRADE_HEADERS:
                lines.append(b"%b: %b\r\n" % (name, value))
        closes = any(name == b"connection" and b"close" in value for name, value in self.headers)
        lines.append(b"connection: close\r\n\r\n" if closes else b"\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"".join(lines) + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._messages += 1
        self._in_head = True
        self._hosts = self._head_size = self._head_fed = self._framing = self._body_left = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer
        name = name.lower()
        self._head_size += len(name) + len(value) + 4
        if name == b"host":
            self._hosts += 1
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        elif name == b"content-length" and value.isdigit():
            self._body_left = int(value[:18])
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._ignores_input or self.parser.should_upgrade():
            return
        if self._head_size + len(self.url) > self.limits.head_bytes:
            self._refuse_head()
            return
        if self._hosts != 1 and (self._hosts or self.parser.get_http_version() == "1.1"):
            why = f"the request has {self._hosts} Host headers: send exactly one"
            self._refuse(400, why, "bad_host")
            return
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
            excerpt = b", ".join(codings)[:100].decode("latin-1")
            why = f"the transfer-encoding is {excerpt!r}: only chunked is supported"
            self._refuse(400, why, "bad_request")
            return
        super().on_headers_complete()
        self._in_body = True
        if not self.cycle.keep_alive:
            self._last = self.cycle
        if self.pipeline:
            self.flow.resume_reading()  # undoes uvicorn's pause, which would hide a disconnect

    def on_body(self, body: bytes) -> None:
        self._received += len(body)
        self._body_left -= len(body)
        if self._in_body and not self._ignores_input:
            super().on_body(body)

    def on_chunk_header(self) -> None:
        self._framing -= CHUNK_FRAME

    def on_message_complete(self) -> None:
        if not self._in_body or self._ignores_input:
            return
        self._in_body = False
        super().on_message_complete()
        # uvicorn pauses reading for a large body, and no handler resumes it after the last piece:
        # a client that leaves would not be noticed.
        self.flow.resume_reading()
        if self._last is self.cycle:
            self._ignores_input = True
            if self.cycle.response_complete:
                self.transport.close()

    # Responding

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._presence = Presence()
        cast("dict[str, Any]", cycle.scope)["extensions"] = {GONE: self._presence.when_gone}
        super()._start_asgi_task(cycle, app if cycle.keep_alive else last_response(app, cycle))

    def on_response_complete(self) -> None:
        finished, self._running = self._running, None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._refusal is not None:
            self._hang_up(self._refusal)
        elif finished is self._last and finished is not None:
            # Read an unneeded body to its end first: otherwise its sender might never read the
            # response.
            if not self._in_body:
                self.transport.close()
        else:
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            if self._pipelined:
                self._feed_pipelined()

    def _leave(self) -> None:
        """Notify the handler of the running request that its client has disconnected."""
        running, self._running = self._running, None
        if running is not None:
            running.disconnected = True
            running.message_event.set()
            self._presence.leave()

    def _refuse_head(self) -> None:
        why = f"the head of a request is larger than {self.limits.head_bytes} bytes"
        self._refuse(431, why, "head_too_large")

    def _refuse(self, status: int, why: str, reason: str) -> None:
        """Run no further request of this client, and send the reason after the response it waits
        for.
        """
        if self._ignores_input:
            return
        self._ignores_input = True
        self.pipeline.clear()
        self._pipelined.clear()
        response = refusal(status, why, reason)
        if self._waits():
            self._refusal = response  # sent after the running response
        elif self._in_body and self.cycle.response_started:
            # A part of its response is sent, and no other response can follow it.
            self.cut()
        else:
            self._leave()
            self._hang_up(response)

    def cut(self) -> None:
        """Reset the connection at once, and with it the running request."""
        self._ignores_input = True
        self._leave()
        reset(self.transport)

    def _hang_up(self, response: bytes) -> None:
        """Send a last response; the client closes the connection, or the second sweep after this
        does.

        Closing at once would reset the connection while the client still writes, and the refusal
        would be lost.
        """
        self._in_head = self._in_body = False
        self.transport.write(response)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    # Deadlines

    def sweep(self, now: float) -> None:
        """End the connection if it exceeded a deadline. Called periodically."""
        if self.flow.held and has_left(self.transport):
            self.cut()
            return
        kind, progress = self._waiting_for()
        watched = (kind, self._messages, self._resumed)
        if watched != self._watched:
            self._watched, self._watched_since, self._progress = watched, now, progress
            return
        limits, waited = self.limits, now - self._watched_since
        if kind == "idle":
            if waited >= limits.keep_alive_seconds:
                self.transport.close()
        elif kind == "head":
            if waited >= limits.head_seconds:
                why = f"the head of the request was not complete after {limits.head_seconds:g} s"
                self._refuse(408, why, "head_timeout")
        elif kind == "refused":
            if waited >= limits.linger_seconds:
                self.cut()
        elif kind != "handler" and waited >= limits.progress_seconds:
            if progress - self._progress >= limits.progress_bytes:
                self._watched_since, self._progress = now, progress
            elif kind == "body":
                pace = f"{limits.progress_bytes} bytes in {limits.progress_seconds:g} s"
                self._refuse(408, f"the body arrived slower than {pace}", "body_timeout")
            else:
                self.cut()

    def _waiting_for(self) -> tuple[str, int]:
        """Return what this connection waits for, and its progress in bytes."""
        transport = self.transport
        # Also a response that ended or goes on below the limit of the buffer: a client that reads
        # it byte by byte would keep the connection for hours.
        if self.flow.write_paused or transport.is_closing() or transport.get_write_buffer_size():
            return "reader", cast(CoalescingTransport, transport).sent_bytes()
        if self._running is None and self._ignores_input and not self._in_body:
            return "refused", 0
        if self._in_head and not self._waits():
            return "head", 0
        if self._in_body and not self._waits() and not self.flow.read_paused:
            return "body", self._received
        return ("idle" if self._running is None else "handler"), 0
