"""A real S3 server, `rclone serve s3`, behind a proxy that breaks connections on request.

rclone 1.75 answers range requests with the range, but with status 200. Amazon's S3 and its other
imitations answer with 206, and so does the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.ports import free_port

KEY, SECRET = "test-access-key", "test-secret-that-never-shows"
BUCKET = "weights"
Kind = Literal["503", "cut", "hang", "403"]


@dataclass
class Fault:
    """What happens to the next `count` requests whose line contains `match`."""

    match: str
    kind: Kind
    count: int = 1


@dataclass
class S3Server:
    """The server's objects are files below `root`; `requests` are the lines it was sent."""

    root: Path
    process: subprocess.Popen[bytes]
    upstream: int
    port: int = 0
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    sent: int = 0

    @property
    def environ(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def url(self, key: str) -> str:
        return f"s3://{BUCKET}/{key}"

    def file(self, key: str) -> Path:
        return self.root / BUCKET / key

    def fail(self, match: str, kind: Kind, count: int = 1) -> None:
        self.faults.append(Fault(match, kind, count))

    def forget(self) -> None:
        self.faults.clear()
        self.requests.clear()
        self.sent = 0

    def count(self, match: str) -> int:
        return sum(match in line for line in self.requests)


def rclone() -> str:
    return str(Path(sys.executable).parent / "rclone")


@contextmanager
def s3_server(root: Path) -> Iterator[S3Server]:
    (root / BUCKET).mkdir(parents=True)
    upstream = free_port()
    process = subprocess.Popen(
        [rclone(), "serve", "s3", "--addr", f"127.0.0.1:{upstream}", "--auth-key",
         f"{KEY},{SECRET}", "--dir-cache-time", "0s", str(root)],
        env={"HOME": str(root), "PATH": os.environ["PATH"], "GOMAXPROCS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    server = S3Server(root, process, upstream)
    try:
        _wait(server)
        with _proxy(server):
            yield server
    finally:
        process.kill()
        process.wait()


def _wait(server: S3Server) -> None:
    deadline = time.monotonic() + 60
    while server.process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{server.upstream}/", timeout=5)
        except urllib.error.HTTPError:
            return  # it wants a signature
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"rclone did not start: {server.process.poll()}")


@contextmanager
def _proxy(server: S3Server) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def run() -> None:
        listening = await asyncio.start_server(lambda r, w: _serve(server, r, w), "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await listening.serve_forever()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join(30)
        loop.close()


async def _serve(
    server: S3Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
        while await _forward(server, reader, writer):
            pass
    writer.close()


async def _forward(
    server: S3Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Forward one request; return whether the connection stays."""
    head = await reader.readuntil(b"\r\n\r\n")
    line = head.split(b"\r\n", 1)[0].decode()
    server.requests.append(line)
    body = await reader.readexactly(int(_header(head, b"content-length") or 0))
    fault = next((f for f in server.faults if f.match in line and f.count > 0), None)
    if fault is not None:
        fault.count -= 1
        if fault.kind == "hang":
            await asyncio.sleep(3600)
        if fault.kind in ("503", "403"):
            code, status = ("SlowDown", "503 Slow") if fault.kind == "503" else (
                "ExpiredToken", "403 Forbidden")  # fmt: skip
            text = f"<Error><Code>{code}</Code><Message>{SECRET}</Message></Error>".encode()
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n".encode())
            writer.write(text)
            await writer.drain()
            return True
    from_upstream, to_upstream = await asyncio.open_connection("127.0.0.1", server.upstream)
    try:
        to_upstream.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1) + body)
        reply = await from_upstream.readuntil(b"\r\n\r\n")
        if _header(reply, b"content-range"):
            reply = reply.replace(b"200 OK", b"206 Partial Content", 1)
        if b"connection: close" not in reply.lower():
            reply = reply.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
        writer.write(reply)
        length = _header(reply, b"content-length")
        left = 0 if line.startswith("HEAD") else int(length) if length else 1 << 60
        stop = left // 2 if fault is not None and fault.kind == "cut" else 0
        while left > stop:
            part = await from_upstream.read(min(left - stop, 1 << 20))
            if not part:
                break
            left -= len(part)
            server.sent += len(part)
            writer.write(part)
            await writer.drain()
        await writer.drain()
        return False
    finally:
        to_upstream.close()


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None
