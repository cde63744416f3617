"""`lockstep serve --engine ENGINE`: servers of other engines, started by this command or running
already.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.backends.registry import ENGINES, EngineName
from lockstep.checkpoint.manifest import PROBE
from lockstep.checkpoint.probe import Probe
from lockstep.cli.serving.model_identity import ModelIdentity, served_model
from lockstep.cli.serving.sources import (
    ShowStatus,
    StartedWorker,
    WorkerRows,
    gpus_of_workers,
)
from lockstep.models import bundled
from lockstep.tokens import LogprobMode

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet
    from lockstep.launch.placement import Placement
    from lockstep.launch.supervisor import Child, Supervisor

log = logging.getLogger(__name__)
READY_SECONDS = 60.0
CHECKED_BY_MODEL = ("sglang",)
"""Engines whose servers must reproduce the model's own logprobs to join, where they run on a CPU:
SGLang computes some models wrongly there, without any error."""


@dataclass(frozen=True, slots=True)
class LaunchedServers:
    """`count` servers of an engine, started with the engine's own `arguments`.

    `engine` is their name in the registry. With `check_model`, a server joins only if it reproduces
    the logprobs that transformers computes from the model's files.
    """

    engine: EngineName
    model: str
    count: int
    arguments: tuple[str, ...]
    python: Path
    drain_seconds: float
    logprob_mode: LogprobMode
    placement: Placement | None = None
    check_model: bool = False
    starts_workers = True

    async def identity(self) -> ModelIdentity:
        """The identity of the model's files, or its name on the hub."""
        return ModelIdentity.of_files(self.model)

    @asynccontextmanager
    async def joined(self, fleet: Fleet, _: str, show: ShowStatus) -> AsyncIterator[WorkerRows]:
        """Run servers and fleet while the block runs."""
        from lockstep.backends.registry import open_admin

        pool = fleet.pool

        def count_up(_: Child) -> None:
            up = sum(child.state == "running" for child in servers.children)
            show(f"Starting {self._title} with {self.model}: {up} of {self.count} servers ready")

        def restarted(child: Child) -> None:
            if any(worker.id == child.id for worker in pool.workers):  # a drained one is not
                pool.eject(child.id, "it was restarted")

        servers = self._servers(
            on_ready=count_up,
            on_restart=restarted,
        )
        show(f"Starting {self._title} with {self.model}: this takes about a minute")
        async with servers, pool, fleet:
            probing = asyncio.create_task(self._model_probe())
            try:
                await servers.ready()
                fleet.expect(await probing)
            finally:
                probing.cancel()
            gpus = gpus_of_workers(self.placement, servers.children)
            for child in servers.children:
                admin = await open_admin(child.url, backend=self.engine)
                await fleet.add(
                    child.url, admin, worker_id=child.id, logprob_mode=self.logprob_mode,
                    gpus=gpus[child.id],
                )  # fmt: skip
            await pool.wait_ready(self.count, READY_SECONDS)
            yield [
                {"id": server.id, "url": server.url, "system_url": server.url, "pid": server.pid,
                 "gpus": gpus[server.id]}
                for server in servers.children
            ]  # fmt: skip

    @asynccontextmanager
    async def started(self, _: str, show: ShowStatus) -> AsyncIterator[list[StartedWorker]]:
        """Run the servers while the block runs; restart those that end."""
        show(f"Starting {self._title} with {self.model}: this takes about a minute")
        servers = self._servers()
        async with servers:
            await servers.ready()
            gpus = gpus_of_workers(self.placement, servers.children)
            yield [
                StartedWorker(child.id, child.url, child.url, child.pid, self.engine,
                              self.logprob_mode, gpus[child.id])
                for child in servers.children
            ]  # fmt: skip

    @property
    def _title(self) -> str:
        return ENGINES[self.engine].title

    async def _model_probe(self) -> Probe | None:
        """Return what the model's logprobs are, by its files; None where that is not checked."""
        directory = bundled(self.model) or Path(self.model)
        if not self.check_model or not directory.is_dir():
            return None
        with tempfile.TemporaryDirectory(prefix="lockstep-probe-") as folder:
            file = Path(folder) / PROBE
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "lockstep.engine.model_probe", str(directory), str(file)
            )
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise
            if code:
                log.warning(
                    "the logprobs of %s could not be computed (see above; `pip install "
                    "'lockstep-rl[engine]'` is needed): that the servers compute them correctly "
                    "is not checked before the first update", self.model,
                )  # fmt: skip
                return None
            return Probe.read(file)

    def _servers(self, **hooks: Any) -> Supervisor:
        launcher = import_module(f"lockstep.launch.{self.engine}")
        servers: Supervisor = launcher.servers(
            self.model,
            self.count,
            python=self.python,
            arguments=self.arguments,
            logprob_mode=self.logprob_mode,
            placement=self.placement,
            drain_seconds=self.drain_seconds,
            **hooks,
        )
        return servers


@dataclass(frozen=True, slots=True)
class RunningServers:
    """Servers of an engine that run already; vLLM's with VLLM_SERVER_DEV_MODE=1 and
    --enable-scale-out.

    Without Lockstep's worker extension, vLLM's weights are loaded while the servers are paused.
    With `adapters`, servers that cannot load adapters while they sample are rejected.
    """

    engine: EngineName
    urls: tuple[str, ...]
    api_key: str | None
    logprob_mode: LogprobMode | None = None
    adapters: bool = False
    starts_workers = False

    async def identity(self) -> ModelIdentity:
        """The identity of the model that the first server to respond serves."""
        options = {"api_key": self.api_key, "transport": self.engine}
        return ModelIdentity.of_fleet(
            await served_model(self.urls, READY_SECONDS, options), self.urls
        )

    @asynccontextmanager
    async def joined(self, fleet: Fleet, _: str, show: ShowStatus) -> AsyncIterator[WorkerRows]:
        """Keep the servers in the fleet while the block runs."""
        from lockstep.backends.registry import open_admin
        from lockstep.backends.vllm.admin import VllmAdmin

        show(f"Connecting to {', '.join(self.urls)}")
        async with fleet.pool, fleet:
            for url in self.urls:
                admin = await open_admin(url, self.api_key, self.engine)
                if self.adapters and isinstance(admin, VllmAdmin):
                    await admin.check_proved_beside_traffic()
                await fleet.add(url, admin, api_key=self.api_key, logprob_mode=self.logprob_mode)
            await fleet.pool.wait_ready(len(self.urls), READY_SECONDS)
            yield [
                {"id": worker.id, "url": worker.url, "system_url": worker.url, "pid": None}
                for worker in fleet.pool.workers
            ]
