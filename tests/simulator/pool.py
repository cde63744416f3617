"""Routing without HTTP for simulated workers, and a fleet over it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from lockstep.fleet.control.accepted_versions import AcceptedVersions
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool
from lockstep.tokens.errors import LockstepError, NotFound
from tests.simulator.workers import SimulatedWorker


@dataclass(slots=True, eq=False)
class Routed:
    """A worker as the pool knows it."""

    id: str
    process: SimulatedWorker
    state: str = "down"
    held: bool = False
    error: str | None = None
    in_flight: int = 0
    seen: int = 0


@dataclass
class SimulatedPool:
    """Routing without HTTP: what is down comes back through the gate, at each `look`."""

    agreement: AcceptedVersions = field(default_factory=AcceptedVersions)
    routed: dict[str, Routed] = field(default_factory=dict)
    in_flight: int = 0
    waiting: int = 0
    enter: Callable[[Any], Awaitable[None]] | None = None
    processes: dict[str, SimulatedWorker] = field(default_factory=dict)

    @property
    def workers(self) -> list[Routed]:
        return list(self.routed.values())

    def gate(self, gate: Callable[[Any], Awaitable[None]]) -> None:
        self.enter = gate

    async def add(self, url: str, *, worker_id: str) -> None:
        self.routed[worker_id] = Routed(worker_id, self.processes[worker_id])
        await self.look_at(self.routed[worker_id])

    async def remove(self, worker_id: str, *, drain_seconds: float = 0.0) -> None:
        await asyncio.sleep(0)
        if self.routed.pop(worker_id, None) is None:
            raise NotFound(f"there is no worker {worker_id!r}")

    def leave_out(self, worker_id: str, reason: str) -> None:
        self.routed[worker_id].state, self.routed[worker_id].error = "down", reason

    def hold(self, worker_id: str, held: bool) -> None:
        self.routed[worker_id].held = held

    def next_try(self, worker_id: str) -> float | None:
        return None

    async def look(self) -> None:
        """What the health probes of a real pool do, once for every worker."""
        await asyncio.gather(*map(self.look_at, self.workers))

    async def look_at(self, one: Routed) -> None:
        if not one.process.alive or one.seen != one.process.starts:
            one.state, one.seen = "down", one.process.starts
        if one.state == "serving" or not one.process.alive or self.enter is None:
            return
        try:
            await self.enter(one)
        except LockstepError as error:
            one.error = error.message
        else:
            one.state, one.error = "serving", None


def fleet_of(pool: SimulatedPool, *arguments: Any, **options: Any) -> Fleet:
    return Fleet(cast(Pool, pool), *arguments, **options)
