"""A fleet of simulated workers for a test, and the invariant that must hold after every step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.fleet.fan_out import PhaseBudgets
from lockstep.fleet.fleet import Fleet
from tests.simulator.fault_matrix import wrong_with
from tests.simulator.pool import SimulatedPool
from tests.simulator.workers import (
    FIRST,
    SimulatedAdmin,
    SimulatedWorker,
    StagedProbeAdmin,
    contents,
    write_checkpoint,
)

BUDGET = PhaseBudgets(stage=0.5, pause=0.5, commit=0.5, prove=0.5, resume=0.5)


@dataclass
class Simulation:
    fleet: Fleet
    pool: SimulatedPool
    workers: list[SimulatedWorker]
    directory: Path
    meaning: dict[str, str]

    def checkpoint(self, version: str, seed: int | None = None) -> str:
        """A checkpoint whose weights are those that the label means from now on."""
        path = self.directory / version
        if not path.exists():
            write_checkpoint(path, len(self.meaning) if seed is None else seed)
        self.meaning[version] = contents(path)
        return str(path)

    async def update(self, version: str, **options: Any) -> Any:
        return await self.fleet.update_weights(self.checkpoint(version), version=version, **options)

    async def add(
        self, worker: SimulatedWorker, *, mute: bool = False, probes_staged: bool = True
    ) -> None:
        self.pool.processes[worker.name] = worker
        driver = StagedProbeAdmin if probes_staged and not mute else SimulatedAdmin
        admin = driver(worker, probes_while_paused=not mute)
        await self.fleet.add(admin.url, admin, worker_id=worker.name)

    def state(self, worker: SimulatedWorker) -> str:
        return self.fleet.worker(worker.name).state

    def serving(self) -> list[str]:
        return [worker.id for worker in self.pool.workers if worker.routable]

    def check(self, *, settled: bool = True) -> None:
        assert wrong_with(self.fleet, self.pool, self.meaning, settled=settled) == []


@asynccontextmanager
async def simulated(
    directory: Path,
    count: int = 3,
    *,
    mute: bool = False,
    probes_staged: bool = True,
    **options: Any,
) -> AsyncIterator[Simulation]:
    """`mute` workers take no probe while they are paused; `probes_staged`: of staged ones too."""
    first = contents(write_checkpoint(directory / FIRST, 0))
    workers = [SimulatedWorker(f"w{index}", first) for index in range(count)]
    pool = SimulatedPool()
    options = {"budget": BUDGET, **options}
    async with Fleet(pool, options.pop("store", None), **options) as fleet:
        made = Simulation(fleet, pool, workers, directory, {FIRST: first})
        for worker in workers:
            await made.add(worker, mute=mute, probes_staged=probes_staged)
        yield made
