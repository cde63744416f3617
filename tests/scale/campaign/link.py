"""A link between two processes, through a proxy of TCP that can be cut and joined again."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Literal

Cut = Literal["reset", "silent"]
NO_LINGER = struct.pack("ii", 1, 0)


class Link:
    """A port of 127.0.0.1 that leads to another one there, for as long as the link is whole."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._whole = asyncio.Event()
        self._whole.set()
        self._resets = False
        self._ends: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> Link:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._abort()
        self.join()

    def cut(self, how: Cut) -> None:
        """Resets every connection, old and new; or holds every byte back, and says nothing."""
        if how == "silent":
            self._whole.clear()
        else:
            self._resets = True
            self._abort()

    def join(self) -> None:
        """Lets through what comes, and first what was held back, as TCP would send it again."""
        self._resets = False
        self._whole.set()

    def _abort(self) -> None:
        for end in self._ends:
            _reset(end)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        self._ends.add(writer)
        try:
            await self._whole.wait()
            if self._resets:
                raise ConnectionResetError
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            ends.append(back)
            self._ends.add(back)
            pumps = [self._pump(reader, back), self._pump(there, writer)]
            await asyncio.wait(
                [asyncio.create_task(each) for each in pumps], return_when=asyncio.ALL_COMPLETED
            )
        except ConnectionError:
            _reset(writer)
        finally:
            self._ends.difference_update(ends)
            for end in ends:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one end closes: then the other one is told, after all that was sent before."""
        try:
            while data := await reader.read(1 << 16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
            await self._whole.wait()
            writer.close()
        except ConnectionError:
            _reset(writer)


def _reset(end: asyncio.StreamWriter) -> None:
    """Without a lingering time the system sends RST; an abort alone would be an orderly FIN."""
    if not end.transport.is_closing():
        end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    end.transport.abort()
