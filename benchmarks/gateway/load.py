"""The load generator of the gateway benchmark: 32 connections, each with one request at a time.

    python -m benchmarks.gateway.load TRAFFIC

It reads rounds as JSON lines, and writes a line for each: `open` connects, `go` sends requests for
so many seconds (and at least so many) and closes. Every response must have status 200 and the size
of its kind, and one in 32 is decoded and compared; anything else ends the round with an error.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.gateway.reading import check
from benchmarks.gateway.traffic import (
    CASES,
    MARKER,
    PATHS,
    SESSION,
    Case,
    Dialect,
    Traffic,
    chat_body,
    ids_body,
    request,
)

CONNECTIONS = 32
CHECK_EVERY = 32
ROUND_TIMEOUT = 60.0


class Round(msgspec.Struct):
    """`sessions` says how a session is named: in a header, or in the path."""

    port: int
    case: str
    dialect: Dialect
    sessions: str = "header"
    seconds: float = 0.7
    least: int = 2 * CONNECTIONS


class Bad(Exception):
    """A response that is not right; the message says how."""


Requests = Iterator[bytes]


def ids_requests(traffic: Traffic, case: Case, dialect: Dialect) -> Callable[[int], Requests]:
    made = [
        request(PATHS[dialect], ids_body(dialect, case, ids))
        for ids in traffic.prompts[case.prompt]
    ]

    def of(connection: int) -> Requests:
        return (made[at % len(made)] for at in count(connection))

    return of


def chat_requests(traffic: Traffic, name: str, sessions: str) -> Callable[[int], Requests]:
    """Conversations one after the other, each in its own session, from its first turn to its last.

    The connections begin at different turns: so there is always the same mix of them.
    """
    case, messages = CASES[name], traffic.turns[name]
    path, header = PATHS["chat"], f"x-session-id: {SESSION}\r\n"
    if sessions == "path":
        path, header = f"/sessions/{SESSION}{path}", ""
    bodies = [chat_body(case, messages[: 2 * turn + 1]) for turn in range(case.turns)]
    parts = []
    for body in bodies:
        before, session, rest = request(path, body, header).partition(SESSION.encode())
        between, marker, after = rest.partition(MARKER.encode())
        if not session or not marker:
            raise RuntimeError("a request without its marks")
        parts.append((before, between, after))
    numbers = count(time.time_ns())

    def of(connection: int) -> Requests:
        turn = connection % case.turns
        while True:
            mark = b"%016x" % next(numbers)
            for before, between, after in parts[turn:]:
                yield b"".join((before, mark, between, mark, after))
            turn = 0

    return of


class Connection(asyncio.Protocol):
    """Sends a request, waits for the whole response, and so on until its time is over."""

    def __init__(self, requests: Requests, judge: Callable[[bytes, bytes], None]) -> None:
        self._requests = requests
        self._judge = judge
        self._buffer = bytearray()
        self._end = 0
        self.completed = 0
        self._until, self._least = 0.0, 1
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def until(self, moment: float, least: int) -> None:
        """Goes on until then, and until so many responses have come."""
        self._until, self._least = moment, least
        self.send()

    def send(self) -> None:
        self._transport.write(next(self._requests))

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(Bad(f"the gateway closed a connection: {error}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._complete()
        if not end:
            return
        try:
            head, body = bytes(self._buffer[:end]), bytes(self._buffer[end + 4 :])
            self._buffer.clear()
            self._end = 0
            self._judge(head, body)
        except Exception as error:
            if not self.over.done():
                self.over.set_exception(error)
            return
        self.completed += 1
        if self.completed >= self._least and time.perf_counter() >= self._until:
            self.over.set_result(None)
        else:
            self.send()

    def _complete(self) -> int:
        """Where the head ends, once the response is whole; 0 before."""
        if not self._end:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return 0
            head = bytes(self._buffer[:end]).lower()
            at = head.find(b"\r\ncontent-length:")
            self._end = end
            self._need = end + 4 + int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if self._need:
            return self._end if len(self._buffer) >= self._need else 0
        return self._end if self._buffer.endswith(b"\r\n0\r\n\r\n") else 0


class Load:
    """Runs rounds; each target goes on where its last round ended, so that sessions continue."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._streams: dict[tuple[int, str, str], list[Requests]] = {}
        self._open: list[Connection] = []
        self.checked = 0
        self._responses = 0

    async def open(self, wanted: Round) -> None:
        loop = asyncio.get_running_loop()
        judge = self._judge(wanted)
        for requests in self._requests(wanted):
            _, connection = await loop.create_connection(
                partial(Connection, requests, judge),
                "127.0.0.1",
                wanted.port,
            )
            self._open.append(connection)

    async def go(self, wanted: Round) -> dict[str, float]:
        start = time.perf_counter()
        until, least = start + wanted.seconds, wanted.least // CONNECTIONS
        opened, self._open = self._open, []
        checked = self.checked
        try:
            for one in opened:
                one.until(until, least)
            async with asyncio.timeout(ROUND_TIMEOUT):
                await asyncio.gather(*(one.over for one in opened))
        finally:
            for one in opened:
                one.close()
        return {
            "requests": sum(one.completed for one in opened),
            "checked": self.checked - checked,
            "seconds": time.perf_counter() - start,
        }

    def _requests(self, wanted: Round) -> list[Requests]:
        key = (wanted.port, wanted.case, wanted.dialect)
        if key not in self._streams:
            case = CASES[wanted.case]
            if case.turns:
                of = chat_requests(self._traffic, wanted.case, wanted.sessions)
            else:
                of = ids_requests(self._traffic, case, wanted.dialect)
            self._streams[key] = [of(connection) for connection in range(CONNECTIONS)]
        return self._streams[key]

    def _judge(self, wanted: Round) -> Callable[[bytes, bytes], None]:
        case = CASES[wanted.case]
        completion = self._traffic.completions[case.out]
        # Every response has at least its logprobs: a shorter one cannot be right.
        least = 20 * case.out

        def judge(head: bytes, body: bytes) -> None:
            if not head.startswith(b"HTTP/1.1 200"):
                raise Bad(f"{head.decode()} {body[:2000].decode(errors='replace')}")
            if len(body) < least:
                raise Bad(
                    f"a response of {len(body)} bytes: {body[:2000].decode(errors='replace')}"
                )
            self._responses += 1
            if self._responses % CHECK_EVERY == 1:
                check(wanted.dialect, head, body, completion, case)
                self.checked += 1

        return judge


async def main(traffic: Traffic) -> None:
    load = Load(traffic)
    loop = asyncio.get_running_loop()
    calls: dict[str, Callable[[Round], Any]] = {"open": load.open, "go": load.go}
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        call = json.loads(line)
        try:
            result = await calls[call.pop("call")](msgspec.convert(call, Round))
        except (Bad, OSError, TimeoutError, ValueError, LookupError) as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result or {}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(Traffic.read(Path(sys.argv[1]))))
