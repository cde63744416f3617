"""This machine's part of a Dynamo deployment: a frontend and workers as child processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from lockstep.backends.dynamo.discovery import DynamoDiscovery, wait_until_ready
from lockstep.backends.dynamo.reachable import check_reachable, wait_until_reachable
from lockstep.backends.dynamo.transport import DynamoTransport
from lockstep.http.client.client import HttpClient
from lockstep.launch.placement import Placement
from lockstep.launch.supervisor import Child, Command, Supervisor, worker_names
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.dynamo import environment as dynamo_env
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest, DeadlineExceeded, EngineFailure, UnknownModel

READY_SECONDS = 180.0
FRONTEND_STOP_SECONDS = 5.0
ANNOUNCED = ("system_url", "model", "pid", "instance_id")
"""Fields of a worker's ready line that `rows` has."""
FRONTEND = (
    "import runpy, sys; from lockstep.launch.parent_watch import exit_with_parent;"
    "exit_with_parent(int(sys.argv.pop(1)));"
    "runpy.run_module('dynamo.frontend', run_name='__main__', alter_sys=True)"
)
"""Program of Dynamo's frontend, which ends with its parent as our own processes do."""


class LocalDynamo:
    """A frontend and `count` workers of `model`, alive while the block runs.

    They discover each other through a temporary directory, or through the network that `network`
    configures in Dynamo's variables, together with processes of other hosts. There, either part may
    be missing. `host` is where the frontend listens; `arguments` are those of `lockstep worker`,
    and `placement` has the GPUs of each. A process that dies is restarted, once etcd and NATS are
    reachable; a restarted worker is a new one for Dynamo. Raises BadRequest for no process at all.
    """

    def __init__(
        self,
        model: str,
        count: int,
        *,
        python: Path,
        network: Mapping[str, str] | None = None,
        with_frontend: bool = True,
        host: str = dynamo_env.LOOPBACK,
        port: int = 0,
        rl_port: int = 0,
        arguments: Sequence[str] = (),
        placement: Placement | None = None,
        drain_seconds: float = 30.0,
        on_ready: Callable[[Child], None] = lambda _: None,
    ) -> None:
        if not with_frontend and network is None:
            raise BadRequest(
                "workers without a frontend get no requests: give --discovery too",
                param="frontend",
            )
        if host != dynamo_env.LOOPBACK and dynamo_env.SYSTEM_HOST not in (network or ()):
            raise BadRequest(
                f"host is {host!r}, but the workers advertise {dynamo_env.LOOPBACK}, which other "
                "hosts cannot reach: give --discovery and --advertise too",
                param="host",
            )
        frontend_only = network is not None and with_frontend and count == 0
        self._model = model
        self._count = count
        self._python = str(python)
        self._arguments = tuple(arguments)
        self._placement = placement
        self._drain_seconds = drain_seconds
        self._network = network
        self._host = host
        self._environ: dict[str, str] = {}
        self._stack = AsyncExitStack()
        self._frontend = Supervisor(
            ("frontend",) if with_frontend else (),
            self._frontend_command,
            host=host,
            ports=(port, rl_port),
            before_start=self._reachable,
            drain_seconds=FRONTEND_STOP_SECONDS,
        )
        self._workers = Supervisor(
            () if frontend_only else worker_names(count),
            self._worker_command,
            before_start=self._reachable,
            drain_seconds=drain_seconds,
            on_ready=on_ready,
        )

    @property
    def frontend(self) -> Child | None:
        return next(iter(self._frontend.children), None)

    @property
    def workers(self) -> Sequence[Child]:
        return self._workers.children

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The fields that each worker announced, once all are ready."""
        return [
            {"name": worker.id, **{key: worker.ready.result().get(key) for key in ANNOUNCED}}
            for worker in self.workers
        ]

    async def __aenter__(self) -> LocalDynamo:
        """Start everything; `ready` waits for it. Raises Unavailable when etcd or NATS is
        unreachable."""
        async with AsyncExitStack() as stack:
            if self._network is None:
                store = Path(tempfile.mkdtemp(prefix="lockstep-dynamo-"))
                stack.callback(shutil.rmtree, store, ignore_errors=True)
                # This shell's variables may configure another deployment.
                clean = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
                self._environ = dynamo_env.complete(clean, store)
            else:
                environ = {**os.environ, **self._network}
                environ.pop(dynamo_env.SYSTEM_PORT, None)  # each worker picks its own
                self._environ = dynamo_env.complete(environ)
                if self._count:
                    is_set = dynamo_env.SYSTEM_HOST in environ
                    dynamo_env.check_advertised(self._environ, chosen=is_set)
                await check_reachable(self._environ)
            self._environ.pop("LOCKSTEP_API_KEYS", None)
            # Exited in reverse order: workers finish their requests while the frontend runs.
            await stack.enter_async_context(self._frontend)
            await self._frontend.ready()
            await stack.enter_async_context(self._workers)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ready(self) -> None:
        """Wait until the frontend serves all workers of this machine. Raises EngineFailure or
        DeadlineExceeded that says which of them does not."""
        await self._workers.ready()
        if (frontend := self.frontend) is None:
            return
        discovery = DynamoDiscovery(frontend.url, frontend.system_url)
        own = frozenset(str(row["instance_id"]) for row in self.rows)
        try:
            await wait_until_ready(discovery, own=own, seconds=READY_SECONDS, interval=0.2)
        finally:
            await discovery.close()
        if own:
            await self._until_it_generates(frontend.url)

    async def _until_it_generates(self, url: str) -> None:
        """Wait until a request succeeds: a frontend lists a model before its chat route has it.
        Raises DeadlineExceeded."""
        transport = DynamoTransport(HttpClient(url, retries=0))
        try:
            async with asyncio.timeout(READY_SECONDS):
                while not await self._generates(transport):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{url} lists its model but does not generate after {READY_SECONDS:g} s"
            ) from None
        finally:
            await transport.close()

    async def _generates(self, transport: DynamoTransport) -> bool:
        """Return whether the listed model, if any, generates a token."""
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

    async def failed(self) -> None:
        """Wait forever; raise EngineFailure when the frontend's first process ends."""
        frontend = self.frontend
        if frontend is not None and frontend.process is not None:
            code = await frontend.process.wait()
            raise EngineFailure(f"Dynamo's frontend ended with code {code}: see its message above")
        await asyncio.Event().wait()

    async def _reachable(self) -> None:
        await wait_until_reachable(self._environ)

    def _frontend_command(self, frontend: Child) -> Command:
        port, rl_port = (u.rpartition(":")[2] for u in (frontend.url, frontend.system_url))
        return Command(
            (self._python, "-c", FRONTEND, str(os.getpid()),
             "--http-host", self._host, "--http-port", port),
            {**self._environ, **dynamo_env.FRONTEND, dynamo_env.RL_PORT: rl_port},
            announces=False,
        )  # fmt: skip

    def _worker_command(self, worker: Child) -> Command:
        environ = self._environ
        if self._placement is not None:
            environ = environ | self._placement.environ(self._workers.children.index(worker))
        return Command(
            (self._python, "-m", "lockstep.cli.parent_death", str(os.getpid()),
             "worker", self._model, "--runtime", "dynamo",
             "--drain-seconds", f"{self._drain_seconds:g}", *self._arguments),
            environ,
        )  # fmt: skip
