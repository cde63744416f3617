"""The processes under attack, their four listeners, and raw ways to talk to them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

TOKEN = "abuse-admin-token"
NAMES = ("gateway", "admin", "worker", "system")
SECONDS = 1.0
"""Deadline for progress in these processes: that of a real one is thirty times as long."""
LIMITS = (
    f"progress_seconds={SECONDS}",
    f"head_seconds={SECONDS}",
    "sweep_seconds=0.1",
    "linger_seconds=0.5",
    "connections=150",
)
Name = Literal["gateway", "admin", "worker", "system"]
POSTS: dict[Name, tuple[str, bytes]] = {
    "gateway": ("/tokenize", b'{"prompt":"hi"}'),
    "admin": ("/v1/rl/flush_cache", b"{}"),
    "worker": ("/inference/v1/abort_requests", b'{"request_ids":["nobody"]}'),
    "system": ("/engine/get_weight_version", b"{}"),
}
"""A request with a body that each listener answers with 200, whenever it comes."""
GETS: dict[Name, str] = {
    "gateway": "/health",
    "admin": "/v1/rl/health",
    "worker": "/health",
    "system": "/engine/nothing",
}


@dataclass(frozen=True)
class Listener:
    """One port under attack."""

    name: Name
    port: int

    @property
    def path(self) -> str:
        return POSTS[self.name][0]

    @property
    def body(self) -> bytes:
        return POSTS[self.name][1]

    @property
    def token(self) -> str:
        """The header that opens it, with its line end; empty for an open one."""
        needs_token = self.name in ("admin", "system")
        return f"authorization: Bearer {TOKEN}\r\n" if needs_token else ""

    def head(self, *lines: str, path: str | None = None, method: str = "POST") -> bytes:
        """The head of a request, up to its empty line; `lines` come last."""
        rest = "".join(f"{line}\r\n" for line in lines)
        named = "host: localhost\r\n"
        return f"{method} {path or self.path} HTTP/1.1\r\n{named}{self.token}{rest}\r\n".encode()

    def post(self, body: bytes | None = None, *lines: str, path: str | None = None) -> bytes:
        """A whole request that is answered with 200, unless something else is wrong."""
        sent = self.body if body is None else body
        kind = "content-type: application/json"
        return self.head(kind, f"content-length: {len(sent)}", *lines, path=path) + sent

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def answer(self, sent: bytes) -> tuple[int, Any]:
        """Status and decoded body of the answer to one request."""
        with self.connect() as sock:
            sock.sendall(sent)
            return Responses(sock).next()

    def status(self, sent: bytes) -> int:
        return self.answer(sent)[0]

    def alive(self) -> bool:
        """Whether it still answers what it always answers."""
        return self.status(self.post()) == 200


class Responses:
    """The answers on one connection, one after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._raw = sock, b""

    def next(self) -> tuple[int, Any]:
        """Status and decoded body. Raises ConnectionError when the connection ends before."""
        while b"\r\n\r\n" not in self._raw:
            self._more()
        head, _, self._raw = self._raw.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        while len(self._raw) < length:
            self._more()
        body, self._raw = self._raw[:length], self._raw[length:]
        return int(head.split()[1]), json.loads(body or b"null")

    def _more(self) -> None:
        piece = self._sock.recv(1 << 16)
        if not piece:
            raise ConnectionError("the server ended the connection")
        self._raw += piece


def until_closed(sock: socket.socket) -> bytes:
    """Everything up to the end of the connection; a reset ends it too."""
    raw = b""
    while True:
        try:
            piece = sock.recv(1 << 16)
        except ConnectionError:
            return raw
        if not piece:
            return raw
        raw += piece


class Target:
    """A `lockstep serve` process with one worker."""

    def __init__(
        self, limits: Sequence[str] = LIMITS, in_flight: int | None = 4, **environ: str
    ) -> None:
        limiting = [word for limit in limits for word in ("--limit", limit)]
        worker = ["--max-model-len", "1024", "--arithmetic", "close", *limiting]
        command = [sys.executable, "-m", "lockstep", "serve", "tiny", "--json", "--port", "0",
                   "--admin-port", "0", "--sessions", "memory", *limiting,
                   *(() if in_flight is None else ("--max-in-flight", str(in_flight))),
                   "--worker-args", " ".join(worker)]  # fmt: skip
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**clean, "LOCKSTEP_ADMIN_TOKEN": TOKEN, **environ},
        )
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"it ended with code {self.process.wait()}: {self.log()}")
        ready = json.loads(line)
        (worker_ready,) = ready["workers"]
        urls = (ready["url"], ready["admin_url"], worker_ready["url"], worker_ready["system_url"])
        self.listeners: dict[str, Listener] = {
            name: Listener(name, urlsplit(url).port or 0)
            for name, url in zip(POSTS, urls, strict=True)
        }
        self.pids = {"gateway": self.process.pid, "worker": worker_ready["pid"]}

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def memory(self, name: str) -> int:
        """Megabytes that a process has in memory now."""
        status = Path(f"/proc/{self.pids[name]}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) >> 10

    def serving(self) -> int:
        """How many workers get traffic."""
        gateway = self.listeners["gateway"]
        _, body = gateway.answer(gateway.head(path="/health", method="GET"))
        return int(body["serving"])

    def running(self) -> int:
        """How many sequences the engine works on."""
        worker = self.listeners["worker"]
        _, body = worker.answer(worker.head(path="/health", method="GET"))
        return int(body["running"]) + int(body["waiting"])

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self._log.close()


@contextmanager
def running_target() -> Iterator[Target]:
    target = Target()
    try:
        yield target
    finally:
        target.stop()
