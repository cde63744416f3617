"""The state that the parts of a fleet share, and the methods that change it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.backends.admin import Admin, Fenced
from lockstep.checkpoint.stores.url import AllowedRoots
from lockstep.fleet.control.operations import Operations
from lockstep.fleet.fan_out import PhaseBudgets
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Desired, Reference
from lockstep.storage.protocols import ControlStore, Leadership
from lockstep.tokens.errors import NotFound, Unavailable
from lockstep.tokens.operation import RequiredProof


class FleetState:
    """Workers, desired state, operations and leadership of one fleet.

    Every part of a fleet (pauses, worker gate, leader, replica, membership, weight updates) takes
    this object, and `Fleet` composes them. The parts do not know each other's callers.

    `desired` changes only in `decide` and `adopt`. On the leader both run under `operations.lock`,
    so an operation sees no change but its own. `leads` is set by `Leader` only.
    """

    def __init__(
        self,
        pool: Pool,
        store: ControlStore,
        leadership: Leadership,
        *,
        roots: Sequence[str | Path] = (),
        budget: PhaseBudgets | None = None,
        require_proof: RequiredProof = "any",
    ) -> None:
        self.require_proof: RequiredProof = require_proof
        self.pool = pool
        self.store = store
        self.leadership = leadership
        self.operations = Operations(store)
        self.budget = budget or PhaseBudgets()
        self.allowed = AllowedRoots.of(roots)
        directories = self.allowed.directories
        self.roots = tuple(
            root.resolve() for root in ((Path("/"),) if directories is None else directories)
        )
        """Directories that weights and adapters may be read from."""
        self.refused: dict[str, str] = {}
        """Workers that discovery lists but the fleet rejected: id to reason."""
        self.leads = False
        """Whether this gateway may change the workers now. False until it has taken them over."""
        self.expected: Reference | None = None
        """The logprobs of the weights that workers start with, where known apart from them."""
        self._desired = Desired()

    @property
    def desired(self) -> Desired:
        """The state that every serving worker must hold."""
        return self._desired

    async def decide(self, desired: Desired) -> None:
        """Record a new desired state, then adopt it.

        Raises Unavailable when the store cannot record it and Superseded when another gateway leads
        by now. The desired state is then unchanged.
        """
        await self.store.save(desired)
        self._desired = desired

    def adopt(self, desired: Desired) -> None:
        """Take over a desired state without recording it.

        For states that the store has already (read from it, or saved together with the workers'
        records), and for the end of a pause, which must not wait for the store.
        """
        self._desired = desired

    @property
    def workers(self) -> list[Worker]:
        """Workers with a control side, serving or not. Operations run on these."""
        return [worker for worker in self.pool.workers if worker.admin is not None]

    def worker(self, worker_id: str) -> Worker:
        """Return a worker by id. Raises NotFound, also for a worker without a control side."""
        worker = self.pool.get(worker_id)
        if worker.admin is None:
            raise NotFound(f"worker {worker_id!r} has no control side", param="worker")
        return worker

    def serving(self) -> list[Worker]:
        """Return the serving workers. Raises Unavailable when there are none: an operation over no
        workers has failed."""
        workers = [worker for worker in self.workers if worker.serves]
        if not workers:
            raise Unavailable(f"none of {len(self.workers)} workers is serving")
        return workers

    async def take_in(self, url: str, admin: Admin, worker_id: str, **options: Any) -> Worker:
        """Add a worker, including one announced through the shared store. From now on its commands
        carry the current generation and this gateway's identity. `options` are those of `Pool.add`.
        """
        if isinstance(admin, Fenced):
            admin.fence(lambda: self._desired.generation, self.leadership.holder)
        return await self.pool.add(url, worker_id=worker_id, admin=admin, **options)

    async def remove(self, worker_id: str, *, drain_seconds: float = 30.0) -> None:
        """Drain a worker for up to `drain_seconds`, then drop it. Raises NotFound."""
        worker = self.worker(worker_id)
        try:
            await self.pool.remove(worker_id, drain_seconds=drain_seconds)
        finally:
            await worker.control.close()

    def quarantine(self, worker: Worker, reason: str) -> None:
        """Send no traffic to a worker until it holds and has proved the desired state again."""
        self.pool.quarantine(worker, reason)
