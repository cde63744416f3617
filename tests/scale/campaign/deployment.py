"""Gateways, workers and a store as real processes, and how to harm and mend them."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tests.fleet.fault_injector import Injector
from tests.processes import WorkerProcess
from tests.scale.postgres_server import PostgresServer, postgres_server
from tests.scale.replicas import ReplicaProcess, leader_of

WORKER = ("--max-model-len", "512", "--max-num-seqs", "16")
GATEWAY = (
    "--wait-seconds", "30", "--drain-seconds", "2", "--health-seconds", "2", "--queue-seconds",
    "10", "--budget", "stage=8", "--budget", "pause=4", "--budget", "swap=3", "--budget",
    "commit=4", "--budget", "prove=6", "--budget", "resume=3", "--budget", "straggler=1.5",
)  # fmt: skip
HEAL_SECONDS = 40.0


@dataclass
class Deployment:
    """`gateways` gateways on one PostgreSQL, in front of `workers` workers behind injectors."""

    gateway_count: int = 3
    worker_count: int = 4
    gateways: list[ReplicaProcess] = field(default_factory=list)
    workers: list[WorkerProcess] = field(default_factory=list)
    injectors: list[Injector] = field(default_factory=list)

    async def __aenter__(self) -> Deployment:
        self._stack = AsyncExitStack()
        self.store: PostgresServer = self._stack.enter_context(postgres_server())
        self._url = self.store.schema_url()
        self._ports = [(_free_port(), _free_port()) for _ in range(self.gateway_count)]
        self.workers = [
            await asyncio.to_thread(WorkerProcess, *WORKER) for _ in range(self.worker_count)
        ]
        for worker in self.workers:
            self.injectors.append(await self._stack.enter_async_context(Injector(worker)))
        self.gateways = [self._gateway(index) for index in range(self.gateway_count)]
        for gateway in self.gateways:
            await asyncio.to_thread(lambda gateway=gateway: gateway.ready)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in (*self.gateways, *self.workers):
            process.process.kill()
            process.process.wait(10)
        await self._stack.aclose()

    def _gateway(self, index: int) -> ReplicaProcess:
        named = [
            part for one in self.injectors for part in ("--worker", f"{one.url},{one.system_url}")
        ]
        data, admin = map(str, self._ports[index])
        return ReplicaProcess(
            *named, *GATEWAY, "--port", data, "--admin-port", admin, store=self._url
        )

    def urls(self) -> list[str]:
        """The data ports of the gateways that are meant to serve."""
        return [f"http://127.0.0.1:{data}" for data, _ in self._ports]

    async def leader(self) -> ReplicaProcess:
        """The gateway that leads, once there is one. Raises TimeoutError."""
        async with asyncio.timeout(HEAL_SECONDS):
            while (leader := await leader_of(self.gateways)) is None:
                await asyncio.sleep(0.05)
        return leader

    async def mend(self) -> None:
        """Starts again what is dead."""
        for injector in self.injectors:
            injector.heal()
        for index, worker in enumerate(self.workers):
            if worker.process.poll() is not None:
                ports = [url.rpartition(":")[2] for url in (worker.url, worker.system_url)]
                self.workers[index] = await asyncio.to_thread(
                    WorkerProcess, *WORKER, "--port", ports[0], "--system-port", ports[1]
                )
                self.injectors[index].worker = self.workers[index]
        started = []
        for index, gateway in enumerate(self.gateways):
            if not gateway.alive:
                self.gateways[index] = self._gateway(index)
                started.append(self.gateways[index])
        for gateway in started:
            await asyncio.to_thread(lambda gateway=gateway: gateway.ready)

    async def agreed(self) -> str:
        """The version that every gateway serves on every worker. Raises TimeoutError that shows
        what is in the way."""
        deadline = monotonic() + HEAL_SECONDS
        states: list[Any] = []
        while monotonic() < deadline:
            states = [(await each.admin("GET", "state"))[1] for each in self.gateways]
            versions = {state.get("version") for state in states}
            whole = all(state.get("serving") == self.worker_count for state in states)
            led = sum(state.get("role") == "leader" for state in states) == 1
            if whole and led and len(versions) == 1:
                return str(versions.pop())
            await asyncio.sleep(0.2)
        shown = [
            (state.get("role"), state.get("version"), state.get("error"),
             [(w["id"], w["state"], w["reason"]) for w in state.get("workers", ())])
            for state in states
        ]  # fmt: skip
        raise TimeoutError(f"no agreement after {HEAL_SECONDS:g} s: {shown}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
