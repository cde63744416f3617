"""The real pool, health monitor and state machine over simulated workers, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.backends.admin import Admin
from lockstep.fleet.routing.health import HealthMonitor
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import State, Worker, WorkerHealth
from lockstep.http.client.client import HttpClient
from lockstep.tokens.errors import Unavailable
from tests.simulator.workers import SimulatedWorker

LONG = 1e6
"""Seconds between probes: nothing is probed but by `look`."""


@dataclass(slots=True, eq=False, kw_only=True)
class RoutedWorker(Worker):
    """A worker whose process is simulated. `path` holds the states that it came through."""

    process: SimulatedWorker
    path: list[State]

    async def health(self, seconds: float = 0.0) -> WorkerHealth:
        if not self.process.alive:
            raise Unavailable(f"{self.id} cannot be reached")
        return WorkerHealth(instance=str(self.process.starts))

    async def open(self) -> None:
        """There is no dialect to find out."""

    def become(self, state: State, reason: str | None = None) -> None:
        Worker.become(self, state, reason)
        if state != self.path[-1]:
            self.path.append(state)

    @property
    def seen(self) -> bool:
        """Whether the pool has noticed the last start of the process."""
        return self.instance == str(self.process.starts)


class _Monitor(HealthMonitor):
    async def _watch(self, worker: Worker) -> None:
        """Nobody is watched: `look` is the clock."""


class SimulatedPool(Pool):
    """A pool that probes its workers when `look` is called, and never by itself."""

    def __init__(self, processes: Mapping[str, SimulatedWorker] | None = None) -> None:
        super().__init__(probe_seconds=LONG)
        self._health = _Monitor(self._rendezvous, LONG)
        self.processes = dict(processes or {})

    @property
    def routed(self) -> list[RoutedWorker]:
        """Every worker of the pool."""
        return [worker for worker in self.workers if isinstance(worker, RoutedWorker)]

    async def add(
        self,
        url: str,
        *,
        worker_id: str | None = None,
        admin: Admin | None = None,
        **_: Any,
    ) -> Worker:
        name = worker_id or url
        worker = RoutedWorker(
            name,
            url,
            HttpClient(url),
            admin=admin,
            accepted=self.accepted,
            process=self.processes[name],
            path=["joining"],
        )
        await self._health.add(worker)
        return worker

    async def look(self) -> None:
        """What the health probes do, once for every worker."""
        await asyncio.gather(*map(self.look_at, self.workers))

    async def look_at(self, worker: Worker) -> None:
        """Probes a worker; once more when that ejected it because it was restarted."""
        served = worker.serves
        await self._health.probe(worker)
        if served and worker.state == "down":
            await self._health.probe(worker)
