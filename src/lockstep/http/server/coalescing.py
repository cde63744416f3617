"""Transport that joins all writes of one event-loop iteration into one.

The events of a stream often arrive together, and each write to a socket costs more than the event.
"""

from __future__ import annotations

import asyncio
from typing import Any

HELD_BYTES = 64 << 10
"""Most bytes that are held: beyond that the socket is written, so that its own flow control sees
the rest.
"""


class CoalescingTransport:
    """A transport whose writes are joined until the event loop's next iteration."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []
        self._size = 0
        self._written = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)
        self._size += len(data)
        self._written += len(data)
        if self._size > HELD_BYTES:
            self._flush()

    def get_write_buffer_size(self) -> int:
        return self._size + self._transport.get_write_buffer_size()

    def sent_bytes(self) -> int:
        """Return how many bytes the kernel has taken."""
        return self._written - self.get_write_buffer_size()

    def write_eof(self) -> None:
        """Close the sending side after pending data."""
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Close the connection after pending data."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._pieces, self._size = [], 0
        self._transport.abort()

    def _flush(self) -> None:
        if self._pieces:
            pieces, self._pieces, self._size = self._pieces, [], 0
            if self._transport.is_closing():
                return  # the peer disconnected since the write, and uvloop would raise
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
