"""A fleet: workers that all serve one desired state, and the operations that change it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lockstep.backends.admin import Admin, Broadcaster, PauseMode, Source
from lockstep.checkpoint.probe import Probe
from lockstep.fleet.fan_out import PhaseBudgets, run_or_quarantine, undo_nothing
from lockstep.fleet.gate import WorkerGate
from lockstep.fleet.leader import Leader
from lockstep.fleet.membership import Membership
from lockstep.fleet.pauses import Pauses
from lockstep.fleet.replica import Replica
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.state import FleetState
from lockstep.fleet.update.adapter_changes import AdapterChanges
from lockstep.fleet.update.new_weights import WeightReader
from lockstep.fleet.update.proof import reference_of
from lockstep.fleet.update.recovery import serve_again
from lockstep.fleet.update.weight_update import WeightUpdate
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Desired
from lockstep.storage.protocols import ControlStore, Leadership
from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.storage.sqlite.leadership import AlwaysLeader
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.operation import Operation, RequiredProof
from lockstep.tokens.versions import check_adapter_name, check_label, check_worker_id

LEASE_SECONDS = 600.0


class Fleet:
    """Workers under one desired state. Use it as an async context manager.

        async with Pool() as pool, Fleet(pool) as fleet:
            await fleet.add(url, await open_admin(admin_url, token))
            await fleet.update_weights("/checkpoints/step_10")

    A worker gets traffic (through `pool`) only while it holds the desired version and adapters and
    has proved them. Weights may come from the directories below `roots`; by default from any.
    """

    def __init__(
        self,
        pool: Pool,
        store: ControlStore | None = None,
        *,
        leadership: Leadership | None = None,
        token: str | None = None,
        roots: Sequence[str | Path] = (),
        budget: PhaseBudgets | None = None,
        lease_seconds: float = LEASE_SECONDS,
        model_dir: Path | None = None,
        fresh: bool = False,
        require_proof: RequiredProof = "any",
    ) -> None:
        """`model_dir` holds the weights that the workers start with, where that is known. With
        `fresh`, the desired state and the workers of a shared store are dropped at the start. With
        `require_proof="held"`, a worker serves only if it shows that the weights it computes with
        are the checkpoint's.

        With a shared `leadership`, this is one of several gateways on `store`: it changes the fleet
        while it leads, and follows the leader otherwise. `token` is the workers' admin token.
        """
        self.state = state = FleetState(
            pool,
            store or SqliteControlStore(),
            leadership or AlwaysLeader(),
            roots=roots,
            budget=budget,
            require_proof=require_proof,
        )
        self.pool, self.operations, self.leadership = pool, state.operations, state.leadership
        self._weights = WeightReader(state.allowed, model_dir, require_proof)
        self._adapters = AdapterChanges(state)
        self._pauses = Pauses(state, lease_seconds)
        self._gate = WorkerGate(state)
        self.membership = Membership(state, token)
        self.replica = Replica(
            state, Leader(state, self._gate, self._pauses), self.membership, fresh=fresh
        )
        pool.gate(self._admit)

    async def __aenter__(self) -> Fleet:
        await self.replica.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pauses.watch(None)
        await self.operations.close(self.state.budget.commit)
        await self.replica.stop()
        for worker in self.workers:
            await worker.control.close()
        await self.state.store.close()

    @property
    def desired(self) -> Desired:
        """The state that every serving worker holds."""
        return self.state.desired

    @property
    def leads(self) -> bool:
        """Whether this gateway may change the workers now."""
        return self.state.leads

    async def _admit(self, worker: Worker) -> None:
        """Bring a worker up while this gateway leads; on a follower, check the leader's record."""
        if self.state.leads:
            await self._gate.bring_up(worker)
        else:
            self.replica.admit(worker)

    def expect(self, probe: Probe | None) -> None:
        """Require the first worker to reproduce a probe of the weights that workers start with.

        Without it, the first worker's own logprobs are what later ones must reproduce.
        """
        self.state.expected = reference_of(probe)

    # Workers

    async def add(
        self, url: str, admin: Admin, *, worker_id: str | None = None, **options: Any
    ) -> Worker:
        """Add a worker. It serves once it was brought to the desired state and has proved it.

        Its id defaults to its host and port. `options` are those of `Pool.add`. A worker of the
        same id at another URL is replaced if it no longer responds. Raises Conflict when the id is
        taken and BadRequest when it is not a valid id.
        """
        worker_id = check_worker_id(worker_id or url.partition("://")[2].rstrip("/"))
        if (joined := self.membership.claim(worker_id, url)) is not None:
            await admin.close()
            return joined
        async with self.membership.adding(worker_id, url):
            return await self.state.take_in(url, admin, worker_id, **options)

    async def remove(self, worker_id: str, *, drain_seconds: float = 30.0) -> None:
        """Drain a worker for up to `drain_seconds`, then drop it. Raises NotFound."""
        await self.state.remove(worker_id, drain_seconds=drain_seconds)

    @property
    def workers(self) -> list[Worker]:
        """Workers with a control side, serving or not. Operations run on these."""
        return self.state.workers

    def worker(self, worker_id: str) -> Worker:
        """Return a worker by id. Raises NotFound, also for a worker without a control side."""
        return self.state.worker(worker_id)

    # Operations

    async def update_weights(
        self,
        weight_dir: str | None = None,
        *,
        version: str | None = None,
        source: Source | None = None,
        mode: PauseMode = "keep",
        key: str | None = None,
    ) -> Operation:
        """Update the weights of all workers, verified, from a directory or another source.

        `version` defaults to the directory's name. If that label names other weights here, a digest
        is added (`step_1@3fb2c0d91a6e`); a `version` given explicitly is then a Conflict. Workers
        must reproduce the probe beside the checkpoint, if there is one.

        A version that is already served is not loaded again. When no worker serves, the update runs
        on the quarantined workers that respond, and the operation has a warning. Raises the error
        that stopped the update; its `operation` holds the result of every worker.
        """
        update = WeightUpdate(
            self.state, self.replica, self._weights,
            weight_dir=weight_dir, source=source, version=version, mode=mode,
        )  # fmt: skip
        operation = await self.operations.run("update_weights", update.request, update.run, key=key)
        await serve_again(self.pool, update.recovered, self.state.budget.prove)
        return operation

    async def pause(
        self,
        mode: PauseMode = "keep",
        *,
        lease_seconds: float | None = None,
        key: str | None = None,
    ) -> Operation:
        """Pause all workers; return when none generates. The pause ends when its lease does."""
        return await self._pauses.pause(mode, lease_seconds, key)

    async def resume(self, *, key: str | None = None) -> Operation:
        """Let every worker generate again. Does nothing on workers that are not paused."""
        return await self._pauses.resume(key)

    async def flush(self, *, key: str | None = None) -> Operation:
        """Drop cached prefixes on every worker."""

        async def work(operation: Operation) -> None:
            await run_or_quarantine(
                "flush", self.state.serving(), lambda worker: worker.control.flush(),
                self.state.budget.resume, operation, self.state.quarantine, undo=undo_nothing,
            )  # fmt: skip

        return await self.operations.run("flush_cache", {}, work, key=key)

    async def load_adapter(
        self, name: str, path: str, *, version: str | None = None, key: str | None = None
    ) -> Operation:
        """Load an adapter on every worker and prove it. It replaces an adapter of that name.

        Raises Conflict for the name of the model itself, and while another operation on an adapter
        of that name is under way.
        """
        check_adapter_name(name)
        if version is not None:
            check_label(version, "version")

        async def work(operation: Operation) -> None:
            await self._adapters.load(name, path, version, operation)

        request = {"lora_name": name, "lora_path": path, "version": version}
        return await self.operations.run(
            "load_lora_adapter", request, work, key=key, alone="lora_name"
        )

    async def unload_adapter(self, name: str, *, key: str | None = None) -> Operation:
        """Unload an adapter from every worker. Raises NotFound when it is not loaded."""

        async def work(operation: Operation) -> None:
            await self._adapters.unload(name, operation)

        return await self.operations.run(
            "unload_lora_adapter", {"lora_name": name}, work, key=key, alone="lora_name"
        )

    async def init_broadcaster(
        self,
        host: str,
        port: int,
        *,
        group: str = "weights",
        backend: Literal["gloo", "nccl"] = "gloo",
        seconds: float = 60.0,
        key: str | None = None,
    ) -> Operation:
        """Make every worker join a broadcast group whose rank 0 is the trainer.

        Other operations do not wait for it. Raises Conflict while workers are joining a group of
        that name.
        """
        if backend not in ("gloo", "nccl"):
            raise BadRequest(f"backend is {backend!r}: expected gloo or nccl", param="backend")

        async def work(operation: Operation) -> None:
            workers = self.state.serving()
            ranks = {worker: rank for rank, worker in enumerate(workers, start=1)}

            async def join(worker: Worker) -> None:
                rank, size = ranks[worker], len(workers) + 1
                broadcaster = Broadcaster(host, port, rank, size, group, backend, seconds)
                await worker.control.join_group(broadcaster)

            await run_or_quarantine(
                "join", workers, join, seconds + 10, operation, self.state.quarantine,
                undo=undo_nothing,
            )  # fmt: skip

        request = {"host": host, "port": str(port), "group": group}
        return await self.operations.run(
            "init_broadcaster", request, work, key=key, alone="group", beside=True
        )
