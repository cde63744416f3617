"""What HTTP itself costs: our server beside plain uvicorn and granian, our client beside aiohttp.

    python -m benchmarks.http.bench

A bare ASGI application, 12 kB in and 6 kB out, 16 connections that are kept, one core for the
server and one for the load. Measured is CPU time per request: of the server's process for the
servers, of this process for the clients.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from itertools import repeat

import aiohttp
import uvloop

from benchmarks import measure, peers, table
from benchmarks.gateway.contestants import (
    GATEWAY_CORE,
    OTHER_CORES,
    free_port,
    ready_line,
    running,
    wait_for,
)
from benchmarks.gateway.load import Bad, Connection
from benchmarks.http.app import RESPONSE
from benchmarks.table import Row
from lockstep.http.client.client import HttpClient

ROUNDS, SECONDS, REQUESTS = 9, 0.7, 6000
CONNECTIONS = 16
BODY = b'{"token_ids": [' + b"12345, " * 1700 + b"1]}"
PATH = "/inference/v1/generate"


@contextmanager
def lockstep_or_uvicorn(name: str) -> Iterator[tuple[int, int]]:
    """The process and the port of a server in this environment."""
    command = [sys.executable, "-m", "benchmarks.http.server", name]
    with running(command, GATEWAY_CORE, cwd=peers.ROOT, stdout=subprocess.PIPE) as process:
        yield process.pid, ready_line(process)["port"]


@contextmanager
def granian() -> Iterator[tuple[int, int]]:
    port = free_port()
    command = [
        str(peers.python("granian")), "-m", "granian", "benchmarks.http.app:app",
        "--interface", "asginl", "--host", "127.0.0.1", "--port", str(port), "--loop", "uvloop",
        "--workers", "1", "--no-access-log", "--log-level", "error", "--no-ws", "--http", "1",
    ]  # fmt: skip
    with running(command, GATEWAY_CORE, cwd=peers.ROOT) as process:
        wait_for(process, f"http://127.0.0.1:{port}/")
        yield process.pid, port


def judge(head: bytes, body: bytes) -> None:
    if not head.startswith(b"HTTP/1.1 200") or body != RESPONSE:
        raise Bad(f"{head.decode()} {body[:200].decode(errors='replace')}")


async def load(port: int, seconds: float) -> int:
    """Sends requests for so long on all connections; returns the number of responses."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += f"user-agent: bench\r\naccept: */*\r\ncontent-length: {len(BODY)}\r\n\r\n"
    request = head.encode() + BODY
    loop = asyncio.get_running_loop()
    opened: list[Connection] = []
    for _ in range(CONNECTIONS):
        make = partial(Connection, repeat(request), judge)
        opened.append((await loop.create_connection(make, "127.0.0.1", port))[1])
    for one in opened:
        one.until(time.perf_counter() + seconds, 10)
    await asyncio.gather(*(one.over for one in opened))
    for one in opened:
        one.close()
    return sum(one.completed for one in opened)


def server_cost(pid: int, port: int) -> Callable[[], float]:
    """Measures microseconds of CPU per request of a server."""

    def spent() -> float:
        return sum(measure.cpu_seconds(one) for one in measure.tree(pid))

    def cost() -> float:
        before = spent()
        responses: int = uvloop.run(load(port, SECONDS))
        return 1e6 * (spent() - before) / responses

    return cost


async def client_cost(call: Callable[[], Awaitable[object]]) -> float:
    """Microseconds of CPU that this process spends on one call, of many, some at a time."""

    async def some(count: int) -> None:
        for _ in range(count):
            await call()

    await asyncio.gather(*(some(5) for _ in range(CONNECTIONS)))
    before = time.process_time()
    await asyncio.gather(*(some(REQUESTS // CONNECTIONS) for _ in range(CONNECTIONS)))
    return 1e6 * (time.process_time() - before) / (REQUESTS // CONNECTIONS * CONNECTIONS)


async def with_ours(port: int) -> float:
    client = HttpClient(f"http://127.0.0.1:{port}")
    try:
        return await client_cost(lambda: client.post(PATH, BODY, headers={"X-Request-Id": "one"}))
    finally:
        await client.close()


async def with_aiohttp(port: int) -> float:
    headers = {"content-type": "application/json", "X-Request-Id": "one"}
    timeout = aiohttp.ClientTimeout(total=1800)
    connector = aiohttp.TCPConnector(limit=1024)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=connector, timeout=timeout, auto_decompress=False
    ) as session:

        async def call() -> bytes:
            async with session.post(PATH, data=BODY, headers=headers) as response:
                if response.status != 200:
                    raise Bad(f"status {response.status}")
                return await response.read()

        return await client_cost(call)


def rows() -> list[Row]:
    os.sched_setaffinity(0, OTHER_CORES)
    with ExitStack() as stack:
        started = {
            "lockstep": stack.enter_context(lockstep_or_uvicorn("lockstep")),
            "uvicorn": stack.enter_context(lockstep_or_uvicorn("uvicorn")),
            "granian": stack.enter_context(granian()),
        }
        servers = measure.in_turns(
            {name: server_cost(pid, port) for name, (pid, port) in started.items()}, ROUNDS
        )
        port = started["uvicorn"][1]
        clients = measure.in_turns(
            {
                "lockstep": lambda: uvloop.run(with_ours(port)),
                "aiohttp": lambda: uvloop.run(with_aiohttp(port)),
            },
            ROUNDS,
        )
    what = "a bare application, 12 kB in, 6 kB out: {}"
    return [
        Row(
            what=what.format("the server"),
            against=f"uvicorn {version('uvicorn')}",
            ours=servers["lockstep"],
            theirs=servers["uvicorn"],
            unit="µs CPU",
            note="ours is uvicorn with limits and deadlines",
        ),
        Row(
            what=what.format("the server"),
            against=peers.VERSIONS["granian"],
            ours=servers["lockstep"],
            theirs=servers["granian"],
            unit="µs CPU",
        ),
        Row(
            what=what.format("the client"),
            against=f"aiohttp {version('aiohttp')}",
            ours=clients["lockstep"],
            theirs=clients["aiohttp"],
            unit="µs CPU",
        ),
    ]


if __name__ == "__main__":
    table.main(rows, __doc__)
