"""Starts embedded workers as child processes, restarts those that die, and stops them all."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

import msgspec

from lockstep.http.server import listen, url_of
from lockstep.tokens.errors import BadRequest, EngineFailure, LockstepError

log = logging.getLogger(__name__)

READY_SECONDS = 300.0
KILL_SECONDS = 5.0
FIRST_BACKOFF = 0.2
LAST_BACKOFF = 30.0
STEADY_SECONDS = 60.0
"""A worker that ran this long has not failed because of how it was started."""

ChildState = Literal["starting", "running", "down", "stopped"]


@dataclass(slots=True, eq=False)
class Child:
    """A worker process. Its URLs stay what they are when it is restarted; its pid does not."""

    id: str
    url: str
    system_url: str
    state: ChildState = "starting"
    pid: int | None = None
    restarts: int = 0
    process: Process | None = None
    ready: asyncio.Future[None] = field(default_factory=asyncio.Future)


class _Ready(msgspec.Struct):
    event: Literal["ready"]


class Supervisor:
    """`count` workers of `model`, alive while the block runs.

    `arguments` are added to each command. `on_restart` is called with a worker that died and is
    ready again: it has the weights it was started with, whatever it had before.
    """

    def __init__(
        self,
        model: str,
        count: int,
        *,
        admin_token: str,
        arguments: Sequence[str] = (),
        on_ready: Callable[[Child], None] = lambda _: None,
        on_restart: Callable[[Child], None] = lambda _: None,
        drain_seconds: float = 30.0,
    ) -> None:
        if count < 1:
            raise BadRequest(f"workers is {count}: expected at least 1", param="workers")
        self._model = model
        self._count = count
        self._token = admin_token
        self._arguments = tuple(arguments)
        self._on_ready = on_ready
        self._on_restart = on_restart
        self._drain_seconds = drain_seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets = ExitStack()
        self._stopping = False
        self.children: tuple[Child, ...] = ()

    async def __aenter__(self) -> Supervisor:
        """Starts the workers; `ready` waits for them."""
        self.children = tuple(
            Child(f"w{index}", self._reserve(), self._reserve()) for index in range(self._count)
        )
        if sys.platform != "linux":
            self._sockets.close()
        self._tasks = [asyncio.create_task(self._keep(child)) for child in self.children]
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self.stop()

    async def ready(self) -> None:
        """Returns when every worker has been ready once. Raises EngineFailure if one ended."""
        await asyncio.gather(*(child.ready for child in self.children))

    async def stop(self) -> None:
        """SIGTERM, so that requests end; SIGKILL for those that take longer than they may."""
        self._stopping = True
        for child in self.children:
            _signal(child, signal.SIGTERM)
        running = [child.process.wait() for child in self.children if child.process is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds + KILL_SECONDS):
                await asyncio.gather(*running)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sockets.close()

    def _reserve(self) -> str:
        """A URL on a free port that stays free.

        On Linux a port that is bound but not listened on can still be listened on by the worker,
        and is given to nobody else while the worker is being restarted.
        """
        sock: socket.socket = self._sockets.enter_context(listen("127.0.0.1", 0))
        return url_of(sock)

    async def _keep(self, child: Child) -> None:
        """Runs the worker again and again, with longer and longer pauses if it keeps dying."""
        loop = asyncio.get_running_loop()
        deaths = 0
        while not self._stopping:
            begun = loop.time()
            try:
                await self._run(child)
            except LockstepError as error:
                if self._stopping:
                    return
                log.error("worker %s: %s", child.id, error.message)
                if not child.ready.done():
                    child.ready.set_exception(error)
                    return
            if self._stopping:
                return
            deaths = 1 if loop.time() - begun > STEADY_SECONDS else deaths + 1
            pause = min(FIRST_BACKOFF * 2.0 ** (deaths - 1), LAST_BACKOFF)
            log.warning("worker %s is started again in %.1f s", child.id, pause)
            await asyncio.sleep(pause)
            child.restarts += 1

    async def _run(self, child: Child) -> None:
        """One life of a worker. Raises EngineFailure when it ends before it was stopped."""
        child.state = "starting"
        process = await self._spawn(child)
        child.process, child.pid = process, process.pid
        try:
            try:
                async with asyncio.timeout(READY_SECONDS):
                    line = await _line(process)
            except TimeoutError:
                raise EngineFailure(f"it was not ready after {READY_SECONDS:g} s") from None
            if not line:
                code = await process.wait()
                raise EngineFailure(
                    f"it ended with code {code} before it was ready: see its message above"
                )
            msgspec.json.decode(line, type=_Ready)
            self._tell(child)
            while await _line(process):
                pass  # a pipe that nobody reads would block it
            code = await process.wait()
            if not self._stopping:
                raise EngineFailure(f"process {process.pid} ended with code {code}")
        except msgspec.DecodeError as error:
            raise EngineFailure(f"it said {line[:200]!r} instead of being ready: {error}") from None
        finally:
            child.state = "stopped" if self._stopping else "down"
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            child.pid = None

    def _tell(self, child: Child) -> None:
        child.state = "running"
        if child.ready.done():
            self._on_restart(child)
        else:
            child.ready.set_result(None)
            self._on_ready(child)

    async def _spawn(self, child: Child) -> Process:
        environ = {**os.environ, "LOCKSTEP_ADMIN_TOKEN": self._token}
        for name in ("LOCKSTEP_API_KEYS", "LOCKSTEP_ADMIN_TOKEN_FILE"):
            environ.pop(name, None)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "lockstep.cli.parent_death", str(os.getpid()),
            "worker", self._model,
            "--port", child.url.rpartition(":")[2],
            "--system-port", child.system_url.rpartition(":")[2],
            "--worker-id", child.id,
            "--drain-seconds", f"{self._drain_seconds:g}",
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=environ,
            start_new_session=True,  # Ctrl-C is for the gateway, which drains before it stops them
        )  # fmt: skip


async def _line(process: Process) -> bytes:
    if process.stdout is None:
        raise EngineFailure("its output cannot be read")
    return await process.stdout.readline()


def _signal(child: Child, number: int) -> None:
    if child.process is not None and child.process.returncode is None:
        with suppress(ProcessLookupError):
            child.process.send_signal(number)
