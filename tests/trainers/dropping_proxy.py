"""A proxy that loses responses: the server did what it was asked, and the client never hears it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter


class DroppingProxy:
    """Forwards HTTP/1.1 to `url`. Of each of `routes`, every second response is lost."""

    def __init__(self, url: str, routes: tuple[str, ...]) -> None:
        host, _, port = url.rpartition("://")[2].partition(":")
        self._target = host, int(port)
        self._routes = routes
        self.requests: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        started.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._client, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request, path = await _message(reader)
                self.requests[path] += 1
                upstream = await asyncio.open_connection(*self._target)
                upstream[1].write(request)
                response, _ = await _message(upstream[0])
                upstream[1].close()
                if path in self._routes and self.requests[path] % 2:
                    self.dropped[path] += 1
                    break
                writer.write(response)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """A whole message with its body, and the last part of the path of a request."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    body = await reader.readexactly(int(fields.get("content-length", 0)))
    return head + body, lines[0].split(" ")[1].rpartition("/")[2]
