"""What every server process shares: sockets, uvicorn, the admin token, and saying ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from lockstep.tokens.errors import BadRequest


class Server(uvicorn.Server):
    """A uvicorn server that leaves the signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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


def server(app: ASGIApp) -> Server:
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5
    )
    return Server(config)


@contextlib.asynccontextmanager
async def serving(
    apps: Sequence[tuple[ASGIApp, socket.socket]],
) -> AsyncIterator[None]:
    """Serves each app on its socket while the block runs; then lets open answers end."""
    servers = [server(app) for app, _ in apps]
    tasks = [
        asyncio.create_task(each.serve(sockets=[sock]))
        for each, (_, sock) in zip(servers, apps, strict=True)
    ]
    try:
        while not all(each.started for each in servers):
            if any(task.done() for task in tasks):
                await asyncio.gather(*tasks)
            await asyncio.sleep(0.005)
        yield
    finally:
        for each in servers:
            each.should_exit = True
        await asyncio.gather(*tasks)


def stop_event() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a server's main coroutine on the fastest loop there is."""
    factory = uvicorn.Config(app=_no_app, loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


async def _no_app(*_: Any) -> None:
    """Stands where uvicorn's configuration wants an application."""
