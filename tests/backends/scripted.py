"""A real HTTP server that replies from a script, and misbehaves where the script says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lockstep.backends.admin_client import CallBudget, CallBudgets
from tests.data.captures import load


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    """A response. `parts` are sent one by one; `fault` says how it goes wrong, if it does.

    reset: the connection is closed before anything is sent. cut: it is closed after the parts,
    before the end. hang: nothing more comes after the parts. goodbye: closed after the
    response without notice.
    """

    parts: tuple[bytes, ...] = ()
    status: int = 200
    streamed: bool = False
    fault: str | None = None
    pause: float = 0.0


def whole(body: bytes | dict[str, Any], status: int = 200, fault: str | None = None) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply((raw,), status, fault=fault)


def events(*datas: bytes, done: bool = True, fault: str | None = None, pause: float = 0) -> Reply:
    parts = [b"data: " + data + b"\n\n" for data in datas]
    return Reply((*parts, *[b"data: [DONE]\n\n"] * done), streamed=True, fault=fault, pause=pause)


def models(owner: str = "vllm", length: int | None = 100, *adapters: str) -> Reply:
    cards: list[dict[str, Any]] = [{"id": "m", "owned_by": owner, "max_model_len": length}]
    cards += [{"id": name, "owned_by": owner, "parent": "m"} for name in adapters]
    return whole({"object": "list", "data": cards})


def captured(engine: str, name: str) -> Reply:
    """Return a response that a real server of this engine sent."""
    capture = load(engine, name)
    return whole(capture.body, capture.status)


def vocabulary_reply(request: Request) -> Reply | None:
    """Return SGLang's rejection of the request by which its driver learns the vocabulary's size."""
    if b'"token_ids_logprob"' not in request.body:
        return None
    message = "token_ids_logprob contains out-of-vocabulary token id; valid range is [0, 512)."
    return whole({"error": {"message": message}}, 400)


Script = Callable[[Request], Reply]

QUICK = CallBudgets(
    quick=CallBudget(0.5, 3),
    load=CallBudget(1, 5),
    commit=CallBudget(0.5, 5),
    pause=CallBudget(0.3, 0.7),
)
"""Budgets of an admin driver whose server is on this machine and fails at once."""


@dataclass
class ScriptedWorker:
    """The control routes of an engine, as much of them as its admin driver can see.

    `replies` are sent instead of its own responses, in turn: those with fault reset after the work
    was done, any other without doing it.
    """

    replies: dict[str, list[Reply]] = field(default_factory=dict, kw_only=True)

    def script(self, request: Request) -> Reply:
        url = urlsplit(request.path)
        body = json.loads(request.body) if request.body else {}
        waiting = self.replies.get(self.key(url.path, body), [])
        reply = waiting.pop(0) if waiting else None
        if reply is not None and reply.fault != "reset":
            return reply
        own = self.respond(url.path, parse_qs(url.query), body)
        return reply or own

    def key(self, path: str, body: dict[str, Any]) -> str:
        """Key of the route in `replies`."""
        return path

    def respond(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Reply:
        """Perform the route and return its response."""
        raise NotImplementedError


@dataclass
class Server:
    """Where it listens, the requests it got, and how many clients disconnected early."""

    url: str
    script: Script
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    left: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def requests_to(self, path: str) -> list[Request]:
        return [request for request in self.requests if request.path == path]

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                request = await read_request(reader)
                reply = vocabulary_reply(request)
                if reply is None:
                    self.requests.append(request)
                    reply = self.script(request)
                if not await self.send(reply, reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def send(
        self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Send the reply; return whether the connection stays open."""
        if reply.fault == "reset":
            writer.transport.abort()
            return False
        kind = "text/event-stream" if reply.streamed else "application/json"
        size = sum(map(len, reply.parts)) + (reply.fault in ("cut", "hang"))
        length = "transfer-encoding: chunked" if reply.streamed else f"content-length: {size}"
        head = f"HTTP/1.1 {reply.status} X\r\ncontent-type: {kind}\r\n{length}\r\n\r\n"
        writer.write(head.encode())
        for part in reply.parts:
            writer.write(b"%x\r\n%s\r\n" % (len(part), part) if reply.streamed else part)
            await writer.drain()
            if reply.pause:
                await asyncio.sleep(reply.pause)
        if reply.fault == "hang":
            await reader.read(1)  # comes back when the client closes the connection
            self.left += 1
            self.gone.set()
            return False
        if reply.streamed and reply.fault is None:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return reply.fault is None


async def read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = first.split()
    return Request(method, path, headers, body)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Server]:
    server = Server("", script)
    listener = await asyncio.start_server(server.talk, "127.0.0.1", 0, limit=1 << 26)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        listener.close_clients() if hasattr(listener, "close_clients") else None
