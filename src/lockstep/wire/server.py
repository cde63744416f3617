"""What every server process shares: sockets, serving, the admin token, and saying ready."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any

try:
    import uvloop
except ImportError:  # there is none for Windows
    uvloop = None

from starlette.types import ASGIApp

from lockstep.tokens.errors import BadRequest
from lockstep.wire.asgi import Listener

BACKLOG = 2048
DRAIN_SECONDS = 5.0
SWEEP_SECONDS = 1.0
YOUNG = 50_000
"""New objects between two looks for garbage cycles. Requests leave next to none, and Python's own
700 would look through those in flight several times per request."""


def say_ready(**fields: object) -> None:
    sys.stdout.write(json.dumps({"event": "ready", **fields}) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def admin_token(given: str | None) -> Iterator[tuple[str, str | None]]:
    """The token and, when it was made here, the 0600 file that holds it while the process lives."""
    if given is not None:
        if len(given) < 8:
            raise BadRequest("the admin token is shorter than 8 characters", param="admin_token")
        yield given, None
        return
    token = secrets.token_urlsafe(32)
    handle, path = tempfile.mkstemp(prefix="lockstep-admin-", suffix=".token")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(token)
        yield token, path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises BadRequest when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise BadRequest(
            f"cannot listen on {host}:{port}: {error.strerror}", param="port"
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def serving(
    apps: Sequence[tuple[ASGIApp, socket.socket]],
) -> AsyncIterator[None]:
    """Serves each app on its socket while the block runs; then lets open answers end."""
    loop = asyncio.get_running_loop()
    listeners = [Listener(app) for app, _ in apps]
    servers = [
        await loop.create_server(listener.connect, sock=sock, backlog=BACKLOG)
        for listener, (_, sock) in zip(listeners, apps, strict=True)
    ]
    sweeping = asyncio.create_task(_sweep(listeners))
    try:
        yield
    finally:
        sweeping.cancel()
        for server in servers:
            server.close()
        await asyncio.gather(*[listener.end(DRAIN_SECONDS) for listener in listeners])
        for server in servers:
            await server.wait_closed()


async def _sweep(listeners: Sequence[Listener]) -> None:
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        for listener in listeners:
            listener.sweep()


def stop_event() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a server's main coroutine on the fastest loop there is."""
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    with asyncio.Runner(loop_factory=None if uvloop is None else uvloop.new_event_loop) as runner:
        runner.run(main)
