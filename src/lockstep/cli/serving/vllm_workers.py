"""`lockstep serve --engine vllm`: vLLM servers, started by this command or running already."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.serving.model_identity import ModelIdentity, served_model
from lockstep.cli.serving.sources import (
    ShowStatus,
    StartedWorker,
    WorkerRows,
    gpus_of_workers,
)
from lockstep.tokens import LogprobMode

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet
    from lockstep.launch.placement import Placement
    from lockstep.launch.supervisor import Child, Supervisor

READY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class VllmWorkers:
    """`count` vLLM servers, started with vLLM's own `arguments`."""

    model: str
    count: int
    arguments: tuple[str, ...]
    python: Path
    drain_seconds: float
    logprob_mode: LogprobMode
    placement: Placement | None = None
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
            show(f"Starting vLLM with {self.model}: {up} of {self.count} servers ready")

        servers = self._servers(
            on_ready=count_up,
            on_restart=lambda child: pool.eject(child.id, "it was restarted"),
        )
        show(f"Starting vLLM with {self.model}: this takes about a minute")
        async with servers, pool, fleet:
            await servers.ready()
            gpus = gpus_of_workers(self.placement, servers.children)
            for child in servers.children:
                admin = await open_admin(child.url, backend="vllm")
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
        show(f"Starting vLLM with {self.model}: this takes about a minute")
        servers = self._servers()
        async with servers:
            await servers.ready()
            gpus = gpus_of_workers(self.placement, servers.children)
            yield [
                StartedWorker(child.id, child.url, child.url, child.pid, "vllm",
                              self.logprob_mode, gpus[child.id])
                for child in servers.children
            ]  # fmt: skip

    def _servers(self, **hooks: Any) -> Supervisor:
        from lockstep.launch.vllm import vllm_servers

        return vllm_servers(
            self.model,
            self.count,
            python=self.python,
            arguments=("--logprobs-mode", f"{self.logprob_mode}_logprobs", *self.arguments),
            placement=self.placement,
            drain_seconds=self.drain_seconds,
            **hooks,
        )


@dataclass(frozen=True, slots=True)
class RunningVllm:
    """vLLM servers that run already, with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out.

    Without Lockstep's worker extension, weights are loaded while the servers are paused. With
    `adapters`, servers that cannot load adapters while they sample are rejected.
    """

    urls: tuple[str, ...]
    api_key: str | None
    logprob_mode: LogprobMode | None = None
    adapters: bool = False
    starts_workers = False

    async def identity(self) -> ModelIdentity:
        """The identity of the model that the first server to respond serves."""
        options = {"api_key": self.api_key, "transport": "vllm"}
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
                admin = await open_admin(url, self.api_key, "vllm")
                if self.adapters and isinstance(admin, VllmAdmin):
                    await admin.check_proved_beside_traffic()
                await fleet.add(url, admin, api_key=self.api_key, logprob_mode=self.logprob_mode)
            await fleet.pool.wait_ready(len(self.urls), READY_SECONDS)
            yield [
                {"id": worker.id, "url": worker.url, "system_url": worker.url, "pid": None}
                for worker in fleet.pool.workers
            ]
