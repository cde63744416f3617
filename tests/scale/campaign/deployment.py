"""Gateways, workers and a store as real processes, and how to harm and mend them."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic
from typing import Any

from tests.fleet.fault_injector import Injector
from tests.processes import WorkerProcess
from tests.scale.campaign.link import Link
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
    """Gateways on one PostgreSQL, each over a link of its own, in front of workers behind injectors
    and links that the gateways share."""

    gateway_count: int = 3
    worker_count: int = 4
    gateways: list[ReplicaProcess] = field(default_factory=list)
    workers: list[WorkerProcess] = field(default_factory=list)
    injectors: list[Injector] = field(default_factory=list)
    worker_links: list[tuple[Link, Link]] = field(default_factory=list)
    store_links: list[Link] = field(default_factory=list)

    async def __aenter__(self) -> Deployment:
        self._stack = AsyncExitStack()
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        self.store: PostgresServer = self._stack.enter_context(postgres_server())
        self._url = self.store.schema_url()
        self.store_links = [await self._link(self.store.port) for _ in range(self.gateway_count)]
        self._ports = [(self._port(), self._port()) for _ in range(self.gateway_count)]
        self._worker_ports = [(self._port(), self._port()) for _ in range(self.worker_count)]
        for index in range(self.worker_count):
            self.workers.append(await self._worker(index))
        for worker in self.workers:
            injector = await self._stack.enter_async_context(Injector(worker))
            self.injectors.append(injector)
            ports = [int(url.rpartition(":")[2]) for url in (injector.url, injector.system_url)]
            self.worker_links.append((await self._link(ports[0]), await self._link(ports[1])))
        self.gateways = [self._gateway(index) for index in range(self.gateway_count)]
        for gateway in self.gateways:
            await asyncio.to_thread(lambda gateway=gateway: gateway.ready)

    async def __aexit__(self, *_: object) -> None:
        for process in (*self.gateways, *self.workers):
            process.process.kill()
            process.process.wait(10)
        await self._stack.aclose()

    def _port(self) -> int:
        """A port for a process that may die and come again: bound here for as long as it is needed,
        so that the system gives it to no other connection, and not listened on."""
        held = self._stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])

    async def _worker(self, index: int) -> WorkerProcess:
        data, system = map(str, self._worker_ports[index])
        return await asyncio.to_thread(
            WorkerProcess, *WORKER, "--port", data, "--system-port", system
        )

    async def _link(self, target: int) -> Link:
        return await self._stack.enter_async_context(Link(target))

    def _gateway(self, index: int) -> ReplicaProcess:
        urls = (
            ",".join(f"http://127.0.0.1:{each.port}" for each in pair) for pair in self.worker_links
        )
        named = [part for each in urls for part in ("--worker", each)]
        data, admin = map(str, self._ports[index])
        store = self._url.replace(f":{self.store.port}/", f":{self.store_links[index].port}/")
        return ReplicaProcess(*named, *GATEWAY, "--port", data, "--admin-port", admin, store=store)

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
        """Joins what is cut, and starts again what is dead."""
        for link in (*chain.from_iterable(self.worker_links), *self.store_links):
            link.join()
        for injector in self.injectors:
            injector.heal()
        for index, worker in enumerate(self.workers):
            if worker.process.poll() is not None:
                self.workers[index] = await self._worker(index)
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
