"""Supervisor of child processes: wait until they are ready, restart those that die, stop them."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from lockstep.http.server.server import listen, url_of
from lockstep.launch.start_time import BASE_SECONDS
from lockstep.tokens.errors import BadRequest, EngineFailure, LockstepError
from lockstep.tokens.exit_codes import WRONG

log = logging.getLogger(__name__)

KILL_SECONDS = 5.0
FIRST_BACKOFF = 0.2
LAST_BACKOFF = 30.0
STEADY_SECONDS = 60.0
"""A child that ran this long did not fail because of how it was started."""
UNHEALTHY_SECONDS = 30.0
HEALTH_SECONDS = 2.0
"""Seconds between two health checks of a child."""

ChildState = Literal["starting", "running", "down", "stopped"]


@dataclass(frozen=True, slots=True)
class Command:
    """How a child is started.

    With `announces`, it writes a JSON line `{"event": "ready", ...}` to its output when it is
    ready, at the latest after `ready_seconds`. Otherwise it counts as ready once it was started.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str] | None = None
    announces: bool = True
    ready_seconds: float = BASE_SECONDS


@dataclass(slots=True, eq=False)
class Child:
    """A child process. Its URLs stay the same when it is restarted; its pid does not.

    `ready` has the fields of its first ready line.
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
    """Return w0, w1, ... Raises BadRequest for a count below 1."""
    if count < 1:
        raise BadRequest(f"workers is {count}: expected at least 1", param="workers")
    return [f"w{index}" for index in range(count)]


class Supervisor:
    """One child process per name, alive while the block runs.

        async with Supervisor(["w0"], lambda child: Command(["serve", child.url])) as supervisor:
            await supervisor.ready()

    `command` returns how a child is started; two ports are reserved for each, by default free ones.
    `before_start` is awaited before each start. `on_ready` is called when a child is ready for the
    first time, `on_restart` when it died and is ready again: it has lost its state. A child whose
    exit code says that its command is wrong is not restarted. A child that is not `healthy` for
    `unhealthy_seconds` is killed, and restarted like one that died.
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
        """Start the children; `ready` waits for them."""
        port, system_port = self._ports
        self.children = tuple(
            Child(name, self._reserve(port), self._reserve(system_port)) for name in self._names
        )
        if sys.platform != "linux":
            self._sockets.close()
        self._tasks = [asyncio.create_task(self._keep_running(child)) for child in self.children]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def ready(self) -> None:
        """Wait until every child has been ready once. Raises EngineFailure if one ended."""
        await asyncio.gather(*(child.ready for child in self.children))

    async def stop(self) -> None:
        """Send SIGTERM, so that requests finish; after the drain time, SIGKILL."""
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
                child.ready.exception()  # read, or asyncio logs it as never retrieved
        self._sockets.close()

    def _reserve(self, port: int) -> str:
        """Return a URL on a port that stays reserved.

        On Linux a child can listen on a port that is bound but not listened on, and no other
        process can take it while the child is being restarted.
        """
        return url_of(self._sockets.enter_context(listen(self._host, port)))

    async def _keep_running(self, child: Child) -> None:
        """Run a child again and again, with growing pauses if it keeps dying."""
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
                log.error("%s is not restarted: its command is wrong", child.id)
                return
            # A child that ran for a while starts over with a short pause; one that dies at its
            # start is given up to LAST_BACKOFF seconds, so that it does not eat the CPU.
            deaths = 1 if loop.time() - begun > STEADY_SECONDS else deaths + 1
            pause = min(FIRST_BACKOFF * 2.0 ** (deaths - 1), LAST_BACKOFF)
            log.warning("restarting %s in %.1f s", child.id, pause)
            await asyncio.sleep(pause)
            child.restarts += 1

    async def _run(self, child: Child) -> None:
        """Run a child once. Raises EngineFailure when it ends before it was stopped."""
        child.state = "starting"
        if self._before_start is not None:
            await self._before_start()
        command = self._command(child)
        process = await _start(command)
        child.process, child.pid = process, process.pid
        health: asyncio.Task[None] | None = None
        try:
            fields = await _ready_line(process, command.ready_seconds) if command.announces else {}
            self._set_ready(child, fields)
            if self._healthy is not None:
                health = asyncio.create_task(self._watch(child, process, self._healthy))
            while process.stdout is not None and await process.stdout.readline():
                pass  # a full pipe would block the child
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
        """Kill a child that has been unhealthy for too long, so that it is restarted."""
        loop = asyncio.get_running_loop()
        last_healthy = loop.time()
        while not self._stopping:
            await asyncio.sleep(min(HEALTH_SECONDS, self._unhealthy_seconds / 4))
            if await healthy(child):
                last_healthy = loop.time()
            elif loop.time() - last_healthy > self._unhealthy_seconds and not self._stopping:
                log.error("killing %s: unhealthy for %.0f s", child.id, loop.time() - last_healthy)
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


async def _start(command: Command) -> Process:
    """Start the process of a command. A cancelled start leaves no process."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command.arguments,
            stdin=DEVNULL,
            stdout=PIPE if command.announces else DEVNULL,
            env=command.environ,
            start_new_session=True,  # Ctrl-C reaches this process only, which stops them in order
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # uvloop loses track of a process whose start is cancelled, and leaves it running.
        process = await starting
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise


async def _ready_line(process: Process, seconds: float) -> dict[str, Any]:
    """Return the ready line of a process; earlier output is skipped. Raises EngineFailure when it
    ends before, takes more than `seconds`, or announces something else."""
    line = b""
    try:
        async with asyncio.timeout(seconds):
            while process.stdout is not None and (line := await process.stdout.readline()):
                if line.startswith(b"{"):
                    break
    except TimeoutError:
        raise EngineFailure(f"it was not ready after {seconds:.0f} s") from None
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
