"""Server processes: sockets, serving, the admin token, and the ready line."""

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
except ImportError:  # not on Windows
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
"""Time that handlers have to notice that their connection was reset, before they are cancelled."""
YOUNG = 50_000
"""New objects between two searches for garbage cycles. Requests create almost none, and Python's
default of 700 would scan the requests in flight several times per request.
"""


def say_ready(**fields: object) -> None:
    """Write the line of JSON on stdout that announces to a supervisor that this process serves."""
    sys.stdout.write(json.dumps({"event": "ready", **fields}) + "\n")
    sys.stdout.flush()


SWITCH_SECONDS = 0.0005
"""Time that one thread may hold the interpreter while another waits. Threads that compute steps or
read weights need it briefly, hundreds of times: with Python's default of 5 ms, staging beside a
busy event loop took six times as long.
"""


@contextlib.contextmanager
def admin_token(chosen: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the token, and the 0600 file that holds it while the process lives if it was
    generated.
    """
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
    """Return a bound socket. With `share`, other processes of the same user may bind the same port,
    and each accepts some of the connections. Raises BadRequest if the address is not available.
    """
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
    """Return the URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Endpoint(NamedTuple):
    """An application, the socket that it listens on, and its TLS files, if any."""

    app: ASGIApp
    sock: socket.socket
    tls: TlsFiles | None = None


class Listener(uvicorn.Server):
    """One application on one socket.

    Unlike uvicorn's own loop it leaves signals alone, enforces deadlines, and `end` returns only
    when every handler has ended.
    """

    def __init__(self, config: ListenerConfig, tls: TlsFiles | None = None) -> None:
        """Raise BadRequest for unusable certificates."""
        super().__init__(config)
        self._limits = config.limits
        self._certificates = None if tls is None else listener_certificates(tls)
        self._connections = cast("set[HttpProtocol]", self.server_state.connections)

    async def start(self, sock: socket.socket) -> None:
        """Listen on the socket."""
        self.config.load()

        def new_protocol() -> HttpProtocol:
            return HttpProtocol(self.config, self.server_state, {})

        # uvicorn's own start has no deadline for TLS handshakes, which precede every other limit.
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
        """Enforce the deadlines of every connection, and reload changed certificates."""
        if self._certificates is not None:
            self._certificates.refresh()
        for connection in list(self._connections):
            connection.sweep(now)

    async def end(self, seconds: float) -> None:
        """Accept no more requests; reset connections whose responses are not sent after
        `seconds`.
        """
        tasks, deadline = self.server_state.tasks, monotonic() + seconds
        for server in self.servers:
            server.close()
        for connection in list(self._connections):
            connection.shutdown()
        while (self._connections or tasks) and monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)  # handlers run, or clients still read
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
    """Serve each app on its socket while the block runs; then let open responses end.

    Responses that are not sent `drain_seconds` after the end of the block are cut off. Each
    listener has `limits`, with fewer connections where the system allows too few open files. Pages
    of other sites may not call the apps, except those of `origins`. Raises BadRequest for unusable
    certificates.
    """
    connections = connections_within(raise_descriptor_limit(), limits.connections, len(apps))
    limits = replace(limits, connections=connections)
    endpoints = [Endpoint(*endpoint) for endpoint in apps]
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
        # Sweep until the end: a client that does not read its response has a deadline while
        # draining, too.
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
    """Return an event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a server's main coroutine on the fastest event loop that is installed."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    with asyncio.Runner(loop_factory=None if uvloop is None else uvloop.new_event_loop) as runner:
        runner.run(main)
