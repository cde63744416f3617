"""A Dynamo deployment on this machine: a frontend and workers as child processes, on loopback."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.backends.dynamo.discovery import DynamoDiscovery, until_ready
from lockstep.backends.dynamo.transport import DynamoTransport
from lockstep.http.client.client import HttpClient
from lockstep.launch.supervisor import Child, Command, Supervisor, worker_names
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.dynamo import environment as dynamo_env
from lockstep.tokens import Sampling
from lockstep.tokens.errors import DeadlineExceeded, EngineFailure, UnknownModel

READY_SECONDS = 180.0
FRONTEND_STOP_SECONDS = 5.0
ANNOUNCED = ("system_url", "model", "pid", "instance_id")
"""Fields of a worker's ready line that are shown."""
FRONTEND = (
    "import runpy, sys; from lockstep.launch.parent_death import exit_with_parent;"
    "exit_with_parent(int(sys.argv.pop(1)));"
    "runpy.run_module('dynamo.frontend', run_name='__main__', alter_sys=True)"
)
"""Dynamo's frontend, which ends with its parent as our own processes do."""


class LocalDynamo:
    """A frontend and `count` workers of `model`, alive while the block runs.

    They find each other in a directory of their own, which goes with them. `arguments` are those
    of `lockstep worker`. A worker that dies is not started again: Dynamo forgets it by itself.
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
        on_ready: Callable[[Child], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._python = str(python)
        self._arguments = tuple(arguments)
        self._drain_seconds = drain_seconds
        self._environ: dict[str, str] = {}
        self._stack = AsyncExitStack()
        self._frontend = Supervisor(
            ("frontend",),
            self._frontend_command,
            ports=(port, rl_port),
            restarts=False,
            drain_seconds=FRONTEND_STOP_SECONDS,
        )
        self._workers = Supervisor(
            worker_names(count),
            self._worker_command,
            restarts=False,
            drain_seconds=drain_seconds,
            on_ready=on_ready,
        )

    @property
    def frontend(self) -> Child:
        return self._frontend.children[0]

    @property
    def workers(self) -> Sequence[Child]:
        return self._workers.children

    @property
    def url(self) -> str:
        return self.frontend.url

    @property
    def rl_url(self) -> str:
        """Where the frontend lists its workers."""
        return self.frontend.system_url

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What each worker announced of itself, once all are ready."""
        return [
            {"name": worker.id, **{key: worker.ready.result().get(key) for key in ANNOUNCED}}
            for worker in self.workers
        ]

    async def __aenter__(self) -> LocalDynamo:
        """Starts everything; `ready` waits for it."""
        async with AsyncExitStack() as stack:
            store = Path(tempfile.mkdtemp(prefix="lockstep-dynamo-"))
            stack.callback(shutil.rmtree, store, ignore_errors=True)
            # What this shell says of another deployment does not hold for this one.
            clean = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
            clean.pop("LOCKSTEP_API_KEYS", None)
            self._environ = dynamo_env.complete(clean, store)
            # Left in turn: the workers end their requests while the frontend still runs.
            await stack.enter_async_context(self._frontend)
            await self._frontend.ready()
            await stack.enter_async_context(self._workers)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def ready(self) -> None:
        """Returns when the frontend serves all workers. Raises EngineFailure or DeadlineExceeded
        that says which of them does not."""
        await self._workers.ready()
        discovery = DynamoDiscovery(self.url, self.rl_url)
        try:
            await until_ready(discovery, len(self.workers), seconds=READY_SECONDS, interval=0.2)
        finally:
            await discovery.close()
        await self._until_it_generates()

    async def _until_it_generates(self) -> None:
        """Returns when a request succeeds: a frontend lists a model before its chat route knows it.
        Raises DeadlineExceeded."""
        transport = DynamoTransport(HttpClient(self.url, retries=0))
        try:
            async with asyncio.timeout(READY_SECONDS):
                while not await self._generates(transport):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.url} lists its model but does not generate after {READY_SECONDS:g} s"
            ) from None
        finally:
            await transport.close()

    async def _generates(self, transport: DynamoTransport) -> bool:
        """Whether the model that it lists, if any, generates a token."""
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
        if (process := self.frontend.process) is not None:
            code = await process.wait()
            raise EngineFailure(f"Dynamo's frontend ended with code {code}: see its message above")

    def _frontend_command(self, frontend: Child) -> Command:
        port, rl_port = (u.rpartition(":")[2] for u in (frontend.url, frontend.system_url))
        return Command(
            (self._python, "-c", FRONTEND, str(os.getpid()),
             "--http-host", "127.0.0.1", "--http-port", port),
            {**self._environ, **dynamo_env.FRONTEND, dynamo_env.RL_PORT: rl_port},
            announces=False,
        )  # fmt: skip

    def _worker_command(self, _: Child) -> Command:
        return Command(
            (self._python, "-m", "lockstep.cli.parent_death", str(os.getpid()),
             "worker", self._model, "--runtime", "dynamo",
             "--drain-seconds", f"{self._drain_seconds:g}", *self._arguments),
            self._environ,
        )  # fmt: skip
