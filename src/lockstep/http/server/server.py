"""What every server process shares: sockets, serving, the admin token, and the ready line."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple, cast

import uvicorn

try:
    import uvloop
except ImportError:  # there is none for Windows
    uvloop = None

from starlette.types import ASGIApp

from lockstep import tracing
from lockstep.http.auth import CrossSiteFilter
from lockstep.http.server.limits import (
    DRAIN_SECONDS,
    LIMITS,
    ServerLimits,
    connections_within,
    raise_descriptor_limit,
)
from lockstep.http.server.protocol import HttpProtocol, ListenerConfig
from lockstep.http.tls import TlsFiles, listener_certificates
from lockstep.tokens.errors import BadRequest

log = logging.getLogger(__name__)
MAX_PORT = 65535
POLL_SECONDS = 0.01
CUT_SECONDS = 1.0
"""How long handlers may take to notice that their clients were cut off, before being cancelled."""
YOUNG = 50_000
"""New objects between two looks for garbage cycles. Requests leave next to none, and Python's own
700 would look through those in flight several times per request."""


def say_ready(**fields: object) -> None:
    """Writes the line of JSON on stdout that tells a supervisor that this process serves."""
    sys.stdout.write(json.dumps({"event": "ready", **fields}) + "\n")
    sys.stdout.flush()


SWITCH_SECONDS = 0.0005
"""How long one thread may keep the interpreter while another waits. Threads that compute steps or
read weights need it for an instant, hundreds of times: with Python's own 5 ms, staging beside a
busy event loop took six times as long."""


@contextlib.contextmanager
def admin_token(chosen: str | None) -> Iterator[tuple[str, str | None]]:
    """The token and, when it was made here, the 0600 file that holds it while the process lives."""
    if chosen is not None:
        if len(chosen) < 8:
            raise BadRequest(
                f"the admin token has {len(chosen)} characters: choose one of 8 or more",
                param="admin_token",
            )
        yield chosen, None
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


def listen(host: str, port: int, *, share: bool = False) -> socket.socket:
    """A bound socket; with `share`, other processes of the same user may bind the same port, and
    each takes some of the connections. Raises BadRequest when the address cannot be had."""
    if not 0 <= port <= MAX_PORT:
        raise BadRequest(f"port is {port}: expected 0 (any) to {MAX_PORT}", param="port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise BadRequest(
            f"cannot listen on {host}:{port}: {error.strerror}", param="port"
        ) from None
    return sock


def url_of(sock: socket.socket, tls: TlsFiles | None = None) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Endpoint(NamedTuple):
    """An application, the socket that it listens on, and TLS where it has it."""

    app: ASGIApp
    sock: socket.socket
    tls: TlsFiles | None = None


class Listener(uvicorn.Server):
    """One application on one socket.

    Unlike uvicorn's own loop it leaves signals alone, looks after deadlines, and returns from its
    end only when every handler has ended.
    """

    def __init__(self, config: ListenerConfig, tls: TlsFiles | None = None) -> None:
        """Raises BadRequest for certificates that cannot be used."""
        super().__init__(config)
        self._limits = config.limits
        self._certificates = None if tls is None else listener_certificates(tls)
        self._connections = cast("set[HttpProtocol]", self.server_state.connections)

    async def start(self, sock: socket.socket) -> None:
        """Listens on the socket."""
        self.config.load()

        def new_protocol() -> HttpProtocol:
            return HttpProtocol(self.config, self.server_state, {})

        # uvicorn's own start has no deadline for handshakes, which come before every other limit.
        certificates = self._certificates
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                new_protocol,
                sock=sock,
                backlog=self.config.backlog,
                ssl=None if certificates is None else certificates.context,
                ssl_handshake_timeout=None if certificates is None else self._limits.head_seconds,
            )
        ]

    def sweep(self, now: float) -> None:
        """Ends what is past its deadline, on every connection; reads changed certificates."""
        if self._certificates is not None:
            self._certificates.refresh()
        for connection in list(self._connections):
            connection.sweep(now)

    async def end(self, seconds: float) -> None:
        """Takes no more requests; responses that are not out after `seconds` are cut off."""
        tasks, deadline = self.server_state.tasks, monotonic() + seconds
        for server in self.servers:
            server.close()
        for connection in list(self._connections):
            connection.shutdown()
        while (self._connections or tasks) and monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)  # handlers work, or clients still read
        if self._connections or tasks:
            log.warning("%d requests were cut off after %g s", len(tasks), seconds)
        for connection in list(self._connections):
            connection.cut()
        if tasks:
            await asyncio.wait(set(tasks), timeout=CUT_SECONDS)
        for task in set(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            await server.wait_closed()


@contextlib.asynccontextmanager
async def serving(
    apps: Sequence[Endpoint | tuple[ASGIApp, socket.socket]],
    *,
    drain_seconds: float = DRAIN_SECONDS,
    limits: ServerLimits = LIMITS,
    origins: Iterable[str] = (),
) -> AsyncIterator[None]:
    """Serves each app on its socket while the block runs; then lets open responses end.

    Responses that are not out `drain_seconds` after the end of the block are cut off. Each listener
    has `limits`, with fewer connections where the system allows too few open files. Pages of other
    sites may call none of them, except those of `origins`. Raises BadRequest for certificates that
    cannot be used.
    """
    connections = connections_within(raise_descriptor_limit(), limits.connections, len(apps))
    limits = replace(limits, connections=connections)
    endpoints = [Endpoint(*each) for each in apps]
    listeners = [
        Listener(ListenerConfig(_traced(CrossSiteFilter(app, origins)), limits), tls)
        for app, _, tls in endpoints
    ]
    started: list[Listener] = []
    sweeping = asyncio.create_task(_sweep(listeners, limits.sweep_seconds))
    try:
        for listener, endpoint in zip(listeners, endpoints, strict=True):
            await listener.start(endpoint.sock)
            started.append(listener)
        yield
    finally:
        await asyncio.gather(*[listener.end(drain_seconds) for listener in started])
        # To the end of it: a client that does not read its response has deadlines then, too.
        sweeping.cancel()


def _traced(app: ASGIApp) -> ASGIApp:
    return app if tracing.active is None else tracing.active.app(app)


async def _sweep(listeners: Sequence[Listener], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(seconds)
        for listener in listeners:
            listener.sweep(loop.time())


def stop_event() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a server's main coroutine on the fastest loop there is."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    with asyncio.Runner(loop_factory=None if uvloop is None else uvloop.new_event_loop) as runner:
        runner.run(main)
