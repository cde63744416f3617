"""How a worker process starts, says that it is ready, drains and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from lockstep.engine import Engine, EngineOptions
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest
from lockstep.worker.data import DataPlane
from lockstep.worker.system import SystemPlane

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How one worker listens. Ports 0 are chosen by the system."""

    model: str
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    system_port: int = 0
    admin_token: str | None = None
    checkpoint_roots: tuple[Path, ...] = ()
    drain_seconds: float = 30.0
    engine: EngineOptions = field(default_factory=EngineOptions)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves the signals to the worker."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_worker(options: WorkerOptions) -> None:
    """Serves until SIGTERM or SIGINT; prints one JSON line on stdout when ready."""
    uvicorn_loop = uvicorn.Config(app=None, loop="auto").get_loop_factory()  # type: ignore[arg-type]
    with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
        runner.run(_serve(options))


async def _serve(options: WorkerOptions) -> None:
    name = options.served_name or Path(options.model).name
    with admin_token(options.admin_token) as (token, token_file), contextlib.ExitStack() as stack:
        data_socket = stack.enter_context(listen(options.host, options.port))
        system_socket = stack.enter_context(listen("127.0.0.1", options.system_port))
        worker = options.engine.worker or url_of(data_socket).removeprefix("http://")
        engine = Engine(options.model, replace(options.engine, worker=worker))
        data = DataPlane(engine, name, bundled(options.model) or Path(options.model))
        system = SystemPlane(engine, token, options.checkpoint_roots)
        servers = [server(data.app), server(system.app)]
        async with engine:
            tasks = [
                asyncio.create_task(s.serve(sockets=[at]))
                for s, at in zip(servers, (data_socket, system_socket), strict=True)
            ]
            stop = asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            while not all(s.started for s in servers):
                if any(task.done() for task in tasks):
                    await asyncio.gather(*tasks)
                await asyncio.sleep(0.005)
            say_ready(
                url=url_of(data_socket),
                system_url=url_of(system_socket),
                model=name,
                pid=os.getpid(),
                admin_token_file=token_file,
                version=engine.version,
                arithmetic=engine.stats()["arithmetic"],
            )
            await stop.wait()
            await drain(engine, data, options.drain_seconds)
            for s in servers:
                s.should_exit = True
            await asyncio.gather(*tasks)


async def drain(engine: Engine, data: DataPlane, seconds: float) -> None:
    """Refuses new requests, lets the others end, and after `seconds` aborts those that did not."""
    data.draining = True
    try:
        async with asyncio.timeout(seconds):
            while engine.busy:
                await asyncio.sleep(0.02)
    except TimeoutError:
        log.warning("requests were still running after %g s: they are aborted", seconds)
        await engine.pause("abort")


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


def server(app: ASGIApp) -> _Server:
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=5
    )
    return _Server(config)
