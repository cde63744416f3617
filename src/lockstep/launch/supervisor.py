"""Runs child processes: waits until they are ready, restarts those that die, and stops them all."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import msgspec

from lockstep.http.server.server import listen, url_of
from lockstep.tokens.errors import BadRequest, EngineFailure, LockstepError
from lockstep.tokens.exit_codes import WRONG

log = logging.getLogger(__name__)

READY_SECONDS = 300.0
KILL_SECONDS = 5.0
FIRST_BACKOFF = 0.2
LAST_BACKOFF = 30.0
STEADY_SECONDS = 60.0
"""A child that ran this long has not failed because of how it was started."""
UNHEALTHY_SECONDS = 30.0
HEALTH_SECONDS = 2.0
"""Between two looks at the health of a child."""

ChildState = Literal["starting", "running", "down", "stopped"]


@dataclass(frozen=True, slots=True)
class Command:
    """How a child is started. `announces`: it writes a JSON line `{"event": "ready", ...}` to its
    output when it is ready; else it counts as ready once it was started."""

    arguments: Sequence[str]
    environ: Mapping[str, str] | None = None
    announces: bool = True


@dataclass(slots=True, eq=False)
class Child:
    """A child process. Its URLs stay what they are when it is restarted; its pid does not.

    `ready` holds the fields of the line that it announced itself with the first time.
    """

    id: str
    url: str
    system_url: str
    state: ChildState = "starting"
    pid: int | None = None
    restarts: int = 0
    exit_code: int | None = None
    process: Process | None = None
    ready: asyncio.Future[dict[str, Any]] = field(default_factory=asyncio.Future)


def worker_names(count: int) -> list[str]:
    """w0, w1, ... Raises BadRequest for no worker at all."""
    if count < 1:
        raise BadRequest(f"workers is {count}: expected at least 1", param="workers")
    return [f"w{index}" for index in range(count)]


class Supervisor:
    """One child process for each name, alive while the block runs.

    `command` says how a child is started; two ports are reserved for each, by default free ones.
    `before_start` is awaited before each start. `on_ready` is called when a child is ready for the
    first time, `on_restart` when it died and is ready again: it has lost what it held. One whose
    exit code says that its command is wrong stays dead. A child that `healthy` denies for
    `unhealthy_seconds` on end is killed, and started again as one that died.
    """

    def __init__(
        self,
        names: Sequence[str],
        command: Callable[[Child], Command],
        *,
        host: str = "127.0.0.1",
        ports: tuple[int, int] = (0, 0),
        drain_seconds: float = 30.0,
        healthy: Callable[[Child], Awaitable[bool]] | None = None,
        unhealthy_seconds: float = UNHEALTHY_SECONDS,
        before_start: Callable[[], Awaitable[object]] | None = None,
        on_ready: Callable[[Child], None] = lambda _: None,
        on_restart: Callable[[Child], None] = lambda _: None,
    ) -> None:
        self._names = tuple(names)
        self._command = command
        self._host = host
        self._ports = ports
        self._drain_seconds = drain_seconds
        self._healthy = healthy
        self._unhealthy_seconds = unhealthy_seconds
        self._before_start = before_start
        self._on_ready = on_ready
        self._on_restart = on_restart
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets = ExitStack()
        self._stopping = False
        self.children: tuple[Child, ...] = ()

    async def __aenter__(self) -> Supervisor:
        """Starts the children; `ready` waits for them."""
        port, system_port = self._ports
        self.children = tuple(
            Child(name, self._reserve(port), self._reserve(system_port)) for name in self._names
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
        """Returns when every child has been ready once. Raises EngineFailure if one ended."""
        await asyncio.gather(*(child.ready for child in self.children))

    async def stop(self) -> None:
        """SIGTERM, so that requests end; SIGKILL for those that take longer than they may."""
        self._stopping = True
        processes = [child.process for child in self.children if child.process is not None]
        for process in processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds + KILL_SECONDS):
                await asyncio.gather(*(process.wait() for process in processes))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in self.children:
            if not child.ready.cancel() and not child.ready.cancelled():
                child.ready.exception()  # read, or asyncio would report an error nobody waited for
        self._sockets.close()

    def _reserve(self, port: int) -> str:
        """A URL on a port that stays free.

        On Linux a port that is bound but not listened on can still be listened on by the child,
        and is taken by nobody else while the child is being restarted.
        """
        return url_of(self._sockets.enter_context(listen(self._host, port)))

    async def _keep(self, child: Child) -> None:
        """Runs the child again and again, with longer and longer pauses if it keeps dying."""
        loop = asyncio.get_running_loop()
        deaths = 0
        while not self._stopping:
            begun = loop.time()
            try:
                await self._run(child)
            except LockstepError as error:
                if self._stopping:
                    return
                log.error("%s: %s", child.id, error.message)
                if not child.ready.done():
                    child.ready.set_exception(error)
                    return
            if self._stopping:
                return
            if child.exit_code == WRONG:
                log.error("%s is not started again: its command is wrong", child.id)
                return
            deaths = 1 if loop.time() - begun > STEADY_SECONDS else deaths + 1
            pause = min(FIRST_BACKOFF * 2.0 ** (deaths - 1), LAST_BACKOFF)
            log.warning("%s is started again in %.1f s", child.id, pause)
            await asyncio.sleep(pause)
            child.restarts += 1

    async def _run(self, child: Child) -> None:
        """One life of a child. Raises EngineFailure when it ends before it was stopped."""
        child.state = "starting"
        if self._before_start is not None:
            await self._before_start()
        command = self._command(child)
        process = await _started(command)
        child.process, child.pid = process, process.pid
        health: asyncio.Task[None] | None = None
        try:
            self._set_ready(child, await _ready_line(process) if command.announces else {})
            if self._healthy is not None:
                health = asyncio.create_task(self._watch(child, process, self._healthy))
            while process.stdout is not None and await process.stdout.readline():
                pass  # a pipe that nobody reads would block it
            code = await process.wait()
            if not self._stopping:
                raise EngineFailure(f"process {process.pid} ended with code {code}")
        finally:
            if health is not None:
                health.cancel()
            child.state = "stopped" if self._stopping else "down"
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            child.pid, child.exit_code = None, process.returncode

    async def _watch(
        self, child: Child, process: Process, healthy: Callable[[Child], Awaitable[bool]]
    ) -> None:
        """Kills a child that has been unhealthy for too long: only a new one helps then."""
        loop = asyncio.get_running_loop()
        well = loop.time()
        while not self._stopping:
            await asyncio.sleep(min(HEALTH_SECONDS, self._unhealthy_seconds / 4))
            if await healthy(child):
                well = loop.time()
            elif loop.time() - well > self._unhealthy_seconds and not self._stopping:
                log.error("%s was unhealthy for %.0f s: it is killed", child.id, loop.time() - well)
                with suppress(ProcessLookupError):
                    process.kill()
                return

    def _set_ready(self, child: Child, line: dict[str, Any]) -> None:
        child.state = "running"
        if child.ready.done():
            self._on_restart(child)
        else:
            child.ready.set_result(line)
            self._on_ready(child)


async def _started(command: Command) -> Process:
    """The process of a command. A cancelled start leaves none."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command.arguments,
            stdin=DEVNULL,
            stdout=PIPE if command.announces else DEVNULL,
            env=command.environ,
            start_new_session=True,  # Ctrl-C is for this process, which stops them in order
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # uvloop would forget a process whose start is cancelled, and let it run.
        process = await starting
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise


async def _ready_line(process: Process) -> dict[str, Any]:
    """The line by which a process says that it is ready; what it writes before is skipped.

    Raises EngineFailure when it ends or takes too long before, or announces something else.
    """
    line = b""
    try:
        async with asyncio.timeout(READY_SECONDS):
            while process.stdout is not None and (line := await process.stdout.readline()):
                if line.startswith(b"{"):
                    break
    except TimeoutError:
        raise EngineFailure(f"it was not ready after {READY_SECONDS:g} s") from None
    if not line:
        code = await process.wait()
        raise EngineFailure(f"it ended with code {code} before it was ready: see its message above")
    try:
        fields: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise EngineFailure(f"it wrote {line[:200]!r} instead of being ready: {error}") from None
    if fields.get("event") != "ready":
        raise EngineFailure(f"it wrote {line[:200]!r} instead of being ready")
    return fields
