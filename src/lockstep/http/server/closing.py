"""Ends of a connection: a refusal, a last response, or a reset."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from lockstep.protocol.common.error_body import error_body

CLOSED_STATES = (7, 8)
"""States in TCP_INFO: closed, and closed by the peer."""
NO_LINGER = struct.pack("ii", 1, 0)


def reset(transport: asyncio.Transport) -> None:
    """Reset a connection so that the client notices.

    An orderly close would look like the end of a response without a length, and the system would
    keep its unsent data.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    transport.abort()


def has_left(transport: asyncio.Transport) -> bool:
    """Return whether the client has closed a connection that is not being read (known on Linux
    only).
    """
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return True
    return bool(state) and state[0] in CLOSED_STATES


def refusal(status: int, why: str, reason: str) -> bytes:
    """Return the complete response to a client whose request is not handled."""
    body = msgspec.json.encode(error_body(status, why, reason))
    head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
    return STATUS_LINE[status] + head + b"%d\r\n\r\n%b" % (len(body), body)


def last_response(app: Any, cycle: RequestResponseCycle) -> Any:
    """Wrap `app` for the last request of a connection, which the protocol closes and not uvicorn.

    An HTTP/1.0 client does not support chunks: the end of the connection is the end of a response
    without a length, and a broken response must not end in the same way.
    """
    old = cycle.scope["http_version"] == "1.0"

    async def run(scope: Any, receive: Any, send: Any) -> None:
        async def send_last(message: Any) -> None:
            if message["type"] == "http.response.start":
                if old:
                    cycle.chunked_encoding = False
                await send(message)
                cycle.keep_alive = True
            else:
                if old:
                    cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

        try:
            await app(scope, receive, send_last)
        except BaseException:
            if cycle.response_started and not cycle.response_complete:
                reset(cycle.transport)
            raise

    return run
