"""A Dynamo deployment on this machine: a frontend and workers as child processes, on loopback."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from lockstep.backends.dynamo.discovery import DynamoDiscovery, until_ready
from lockstep.backends.dynamo.transport import DynamoTransport
from lockstep.http.client import HttpClient
from lockstep.http.server import listen, url_of
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.dynamo import environment as dynamo_env
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest, DeadlineExceeded, EngineFailure, UnknownModel

log = logging.getLogger(__name__)
READY_SECONDS = 180.0
KILL_SECONDS = 10.0
FRONTEND = (
    "import runpy, sys; from lockstep.launch.parent_death import hold; hold(int(sys.argv.pop(1)));"
    "runpy.run_module('dynamo.frontend', run_name='__main__', alter_sys=True)"
)
"""Dynamo's frontend, which ends with its parent as our own processes do."""


class _Ready(msgspec.Struct):
    system_url: str
    model: str
    pid: int
    instance_id: str


@dataclass(slots=True, eq=False)
class Running:
    """A process of the deployment. Of a worker, `ready` holds what it said when it was."""

    name: str
    process: Process
    ready: asyncio.Future[_Ready] = field(default_factory=asyncio.Future)
    reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def row(self) -> dict[str, Any]:
        """What it said of itself, for people and programs."""
        return {"name": self.name, **msgspec.to_builtins(self.ready.result())}


class LocalDynamo:
    """A frontend and `count` workers of `model`, alive while the block runs.

    They find each other in a directory of their own, which goes with them. `arguments` are those
    of `lockstep worker`. A worker that dies is not started again: Dynamo leaves it out by itself.
    """

    def __init__(
        self,
        model: str,
        count: int,
        *,
        python: Path,
        port: int = 0,
        rl_port: int = 0,
        arguments: Sequence[str] = (),
        drain_seconds: float = 30.0,
        on_ready: Callable[[Running], None] = lambda _: None,
    ) -> None:
        if count < 1:
            raise BadRequest(f"workers is {count}: expected at least 1", param="workers")
        self._model = model
        self._count = count
        self._python = python
        self._ports = (port, rl_port)
        self._arguments = tuple(arguments)
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._kept = ExitStack()
        self._environ: dict[str, str] = {}
        self.url = ""
        self.rl_url = ""
        self.frontend: Running | None = None
        self.workers: list[Running] = []

    async def __aenter__(self) -> LocalDynamo:
        """Starts everything; `ready` waits for it."""
        try:
            port, rl_port = self._ports
            # Bound but not listened on, the ports are given to nobody else until they are used.
            self.url = url_of(self._kept.enter_context(listen("127.0.0.1", port)))
            self.rl_url = url_of(self._kept.enter_context(listen("127.0.0.1", rl_port)))
            store = Path(tempfile.mkdtemp(prefix="lockstep-dynamo-"))
            self._kept.callback(shutil.rmtree, store, ignore_errors=True)
            # What this shell says of another deployment does not hold for this one.
            clean = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
            clean.pop("LOCKSTEP_API_KEYS", None)
            self._environ = dynamo_env.complete(clean, store)
            self.frontend = await self._start_frontend()
            for index in range(self._count):
                self.workers.append(await self.start_worker(f"w{index}"))
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self.stop()

    async def ready(self) -> None:
        """Returns when the frontend serves all workers. Raises EngineFailure or DeadlineExceeded
        that says which of them does not."""
        await asyncio.gather(*(worker.ready for worker in self.workers))
        discovery = DynamoDiscovery(self.url, self.rl_url)
        try:
            await until_ready(discovery, len(self.workers), seconds=READY_SECONDS, interval=0.2)
        finally:
            await discovery.close()
        await self._until_answered()

    async def _until_answered(self) -> None:
        """Returns when a request is answered: a frontend lists a model before its chat route knows
        it. Raises DeadlineExceeded."""
        transport = DynamoTransport(HttpClient(self.url, retries=0))
        try:
            async with asyncio.timeout(READY_SECONDS):
                while not await self._answers(transport):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.url} lists its model but does not answer for it after {READY_SECONDS:g} s"
            ) from None
        finally:
            await transport.close()

    async def _answers(self, transport: DynamoTransport) -> bool:
        """Whether the model it lists, if it does, can be asked for a token."""
        models = await transport.models()
        if not models:
            return False
        try:
            sampling = Sampling(max_tokens=1)
            await transport.generate(
                GenerateRequest(prompt_ids=[1], model=models[0].id, sampling=sampling)
            )
        except UnknownModel:
            return False
        return True

    async def ended(self) -> None:
        """Returns never; raises EngineFailure when the frontend ends."""
        if self.frontend is not None:
            code = await self.frontend.process.wait()
            raise EngineFailure(f"Dynamo's frontend ended with code {code}: see its message above")

    async def start_worker(self, name: str) -> Running:
        """One more worker, not yet ready."""
        process = await asyncio.create_subprocess_exec(
            str(self._python), "-m", "lockstep.cli.parent_death", str(os.getpid()),
            "worker", self._model, "--runtime", "dynamo",
            "--drain-seconds", f"{self._drain_seconds:g}", *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=self._environ,
            start_new_session=True,  # Ctrl-C is for this command, which stops them in order
        )  # fmt: skip
        worker = Running(name, process)
        worker.reading = asyncio.create_task(self._follow(worker))
        return worker

    async def stop(self) -> None:
        """SIGTERM to the workers, so that requests end, then to the frontend; SIGKILL to the slow
        ones."""
        await _end(self.workers, self._drain_seconds + KILL_SECONDS)
        if self.frontend is not None:
            await _end([self.frontend], KILL_SECONDS)
        self._kept.close()

    async def _start_frontend(self) -> Running:
        port, rl_port = self.url.rpartition(":")[2], self.rl_url.rpartition(":")[2]
        process = await asyncio.create_subprocess_exec(
            str(self._python), "-c", FRONTEND, str(os.getpid()),
            "--http-host", "127.0.0.1", "--http-port", port,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={**self._environ, **dynamo_env.FRONTEND, dynamo_env.RL_PORT: rl_port},
            start_new_session=True,
        )  # fmt: skip
        return Running("frontend", process)

    async def _follow(self, worker: Running) -> None:
        """Waits for the line that says ready, then drains the pipe: a full one blocks a worker."""
        out = worker.process.stdout
        while out is not None and (line := await out.readline()):
            if worker.ready.done() or not line.startswith(b"{"):
                continue
            try:
                worker.ready.set_result(msgspec.json.decode(line, type=_Ready))
            except msgspec.DecodeError as error:
                worker.ready.set_exception(
                    EngineFailure(f"worker {worker.name} said {line[:200]!r}: {error}")
                )
            else:
                self._on_ready(worker)
        code = await worker.process.wait()
        if not worker.ready.done():
            worker.ready.set_exception(
                EngineFailure(
                    f"worker {worker.name} ended with code {code} before it was ready: see its "
                    "message above"
                )
            )
        elif code not in (0, -signal.SIGTERM):
            log.warning("worker %s (process %d) ended with code %d", worker.name, worker.pid, code)


async def _end(processes: Sequence[Running], seconds: float) -> None:
    for one in processes:
        if one.process.returncode is None:
            with suppress(ProcessLookupError):
                one.process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(one.process.wait() for one in processes))
    for one in processes:
        if one.process.returncode is None:
            with suppress(ProcessLookupError):
                one.process.kill()
            await one.process.wait()
        if one.reading is not None:
            await asyncio.gather(one.reading, return_exceptions=True)
        if one.ready.done() and not one.ready.cancelled():
            one.ready.exception()  # whoever waited for it has had it
        else:
            one.ready.cancel()


def find_python(given: Path | None) -> Path:
    """The Python that has Dynamo: the one given, this one, or that of .venv-dynamo in this
    directory. Raises BadRequest when there is none."""
    if given is None and importlib.util.find_spec("dynamo") is not None:
        return Path(sys.executable)
    path = given or Path.cwd() / ".venv-dynamo/bin/python"
    found = shutil.which(path)
    if found is None:
        raise BadRequest(
            f"there is no Dynamo at {path}: run scripts/install-dynamo.sh, or give --python, that "
            "of an environment with ai-dynamo and lockstep-rl[engine]",
            param="python",
        )
    return Path(found)
