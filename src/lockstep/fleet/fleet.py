"""A fleet: workers that all serve one desired state, and the operations that change it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from lockstep.backends.admin import Admin, Broadcaster, Fenced, PauseMode, Source
from lockstep.checkpoint.validate import resolve
from lockstep.fleet.control.operations import Operations
from lockstep.fleet.fan_out import PhaseBudgets, everywhere, nothing
from lockstep.fleet.gate import WorkerGate
from lockstep.fleet.pauses import Pauses
from lockstep.fleet.replica import Replica
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.update.adapters import (
    check_not_base,
    load_everywhere,
    prove_again,
    unload_everywhere,
)
from lockstep.fleet.update.new_weights import WeightReader
from lockstep.fleet.update.recovery import serve_again, updatable
from lockstep.fleet.update.take_over import take_over
from lockstep.fleet.update.transaction import Transaction
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Desired, Reference
from lockstep.storage.protocols import ControlStore, Leadership
from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.storage.sqlite.leadership import AlwaysLeader
from lockstep.tokens.errors import (
    BadRequest,
    NotFound,
    Unavailable,
)
from lockstep.tokens.operation import Operation
from lockstep.tokens.versions import check_adapter_name, check_label, check_worker_id

log = logging.getLogger(__name__)
LEASE_SECONDS = 600.0


class Fleet:
    """Workers under one desired state. Use it as an async context manager.

    A worker gets traffic (through `pool`) only while it holds the desired version and adapters,
    proved. `roots` are the directories weights may come from; by default any.
    """

    def __init__(
        self,
        pool: Pool,
        store: ControlStore | None = None,
        *,
        leadership: Leadership | None = None,
        token: str | None = None,
        roots: Sequence[Path] = (),
        budget: PhaseBudgets | None = None,
        lease_seconds: float = LEASE_SECONDS,
        model_dir: Path | None = None,
    ) -> None:
        """`model_dir` is where the weights are that the workers start with, if that is known.

        With a `leadership` that is shared, this is one gateway of several on `store`: it changes
        the fleet while it leads, else it follows who does; `token` is the workers' admin token.
        """
        self.pool = pool
        self._store = store or SqliteControlStore()
        self.leadership = leadership or AlwaysLeader()
        self._roots = tuple(Path(root).resolve() for root in roots or ("/",))
        self._weights = WeightReader(self._roots, model_dir)
        self.budget = budget or PhaseBudgets()
        self.desired = Desired()
        self.leads = False
        self.refused: dict[str, str] = {}
        """Workers that discovery lists and that are not in the fleet, each with the reason."""
        self.operations = Operations(self._store)
        self._pauses = Pauses(self, lease_seconds)
        self._gate = WorkerGate(self)
        self.replica = Replica(self, self._store, self.leadership, token)
        pool.gate(self._gate.bring_up)

    async def __aenter__(self) -> Fleet:
        await self.replica.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pauses.watch(None)
        await self.operations.close(self.budget.commit)
        await self.replica.stop()
        for worker in self.workers:
            await worker.control.close()
        await self._store.close()

    # Leading and following

    async def lead(self, generation: int) -> None:
        """Decides from now on, under that number: what is desired stays, and what an earlier
        leader left half done on the workers is finished or undone."""
        async with self.operations.lock:
            desired = await self._store.desired()
            self.pool.accepted.follow(desired.agreed)
            self.desired = msgspec.structs.replace(desired, generation=generation)
            self._gate.obeyed = False
            try:
                await self.decide(self.desired)
            except Unavailable as error:
                if self.leadership.shared:
                    raise
                # The workers know how high the number has become, and are looked at first.
                log.warning("the generation of this gateway was not recorded: %s", error.message)
            await self._store.cut_off()
            workers = [worker for worker in self.workers if worker.serves]
            await take_over(workers, self.desired, self.quarantine, self.budget)
            self.leads, self.pool.accepted.read_anew = True, None
        self._pauses.watch(self.desired)
        for worker in self.workers:
            if not worker.serves and not worker.leaving:
                self.pool.check(worker.id)

    async def stand_down(self, reason: str) -> None:
        """Changes nothing any more; who waits for an operation gets Unavailable with the reason."""
        self.leads = False
        self._pauses.watch(None)
        await self.operations.abandon(reason)
        for worker in self.workers:
            self.pool.hold(worker, False)

    # Workers

    async def add(
        self, url: str, admin: Admin, *, worker_id: str | None = None, **options: Any
    ) -> Worker:
        """Takes a worker in; it serves once it was brought to the desired state and proved.

        `options` are those of the pool. Raises Conflict when the id exists, BadRequest for one that
        cannot be an id.
        """
        name = check_worker_id(worker_id or url.partition("://")[2].rstrip("/"))
        if (known := self.replica.membership.claim(name, url)) is not None:
            await admin.close()
            return known
        return await self.take_in(url, admin, name, **options)

    async def take_in(self, url: str, admin: Admin, name: str, **options: Any) -> Worker:
        """`add`, also of a worker that the store told of."""
        if isinstance(admin, Fenced):
            admin.fence(lambda: self.desired.generation)
        return await self.pool.add(url, worker_id=name, admin=admin, **options)

    async def remove(self, worker_id: str, *, drain_seconds: float = 30.0) -> None:
        """Gives it nothing new, waits for what it has, forgets it. Raises NotFound."""
        worker = self.worker(worker_id)
        try:
            await self.pool.remove(worker_id, drain_seconds=drain_seconds)
        finally:
            await worker.control.close()

    @property
    def workers(self) -> list[Worker]:
        """The pool's workers that have a control side; operations run on these."""
        return [worker for worker in self.pool.workers if worker.admin is not None]

    def worker(self, worker_id: str) -> Worker:
        """The worker of that id. Raises NotFound, also for one without a control side."""
        worker = self.pool.get(worker_id)
        if worker.admin is None:
            raise NotFound(f"worker {worker_id!r} has no control side", param="worker")
        return worker

    def quarantine(self, worker: Worker, reason: str) -> None:
        """No traffic for it until it was brought to the desired state and proved again."""
        self.pool.quarantine(worker, reason)

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
        """The verified update of all workers, from a directory or another source.

        `version` defaults to the directory's name, with a digest where that names other weights
        (`step_1@3fb2c0d91a6e`); a `version` that names other weights is a Conflict. A probe beside
        the checkpoint is what the workers must reproduce. Raises what stopped it when nothing
        changed; its operation says who and why. A version that is served already is not loaded
        again. When no worker serves, it is done on those in quarantine that respond, and the
        operation says so.
        """
        if (weight_dir is None) == (source is None):
            raise BadRequest(
                f"weight_dir is {weight_dir!r}, and the source {source!r}: give one of the two",
                param="weight_dir",
            )
        label = version or (Path(weight_dir).name if weight_dir else "")
        check_label(label, "version")
        request = {"weight_dir": weight_dir, "version": label, "mode": mode}
        recovered: list[Worker] = []

        async def work(operation: Operation) -> None:
            operation.version = label
            workers = await updatable(self.workers, operation)
            served = any(worker.serves for worker in workers)
            new = await self._weights.read(
                weight_dir, source, label, self.desired, served=served, strict=version is not None
            )
            operation.version = new.version
            operation.warnings += new.warnings
            operation.nbytes = new.nbytes
            if new.is_served:
                return
            transaction = Transaction(
                workers,
                new.source,
                new.version,
                new.proof,
                operation=operation,
                quarantine=self.quarantine,
                hold=self.pool.hold,
                mode=mode,
                paused=self.desired.paused,
                budget=self.budget,
            )

            async def agree(reference: Reference, proved: Sequence[Worker]) -> None:
                desired = self.desired.agree(new.version, new.path, new.digest, reference)
                await self.replica.agree(desired, proved)
                self.desired = desired
                self.pool.accepted.accept(new.version)

            await transaction.run(agree)
            if served:
                await self._prove_adapters(operation)
            else:
                recovered.extend(workers)

        operation = await self.operations.run("update_weights", request, work, key=key)
        await serve_again(self.pool, recovered, self.budget.prove)
        return operation

    async def _prove_adapters(self, operation: Operation) -> None:
        """Has the workers agree on the scores of each adapter on the new weights too."""
        for name, spec in self.desired.adapters.items():
            reference = await prove_again(
                self.serving(), name, budget=self.budget, operation=operation,
                quarantine=self.quarantine,
            )  # fmt: skip
            renewed = msgspec.structs.replace(spec, reference=reference)
            adapters = {**self.desired.adapters, name: renewed}
            await self.decide(msgspec.structs.replace(self.desired, adapters=adapters))

    async def pause(
        self,
        mode: PauseMode = "keep",
        *,
        lease_seconds: float | None = None,
        key: str | None = None,
    ) -> Operation:
        """Returns when no worker generates any more. The pause ends by itself after the lease."""
        return await self._pauses.pause(mode, lease_seconds, key)

    async def resume(self, *, key: str | None = None) -> Operation:
        """Lets every worker generate again; no error when none was paused."""
        return await self._pauses.resume(key)

    async def flush(self, *, key: str | None = None) -> Operation:
        """Forgets cached prefixes on every worker."""

        async def work(operation: Operation) -> None:
            await everywhere(
                "flush", self.serving(), lambda worker: worker.control.flush(),
                self.budget.resume, operation, self.quarantine, undo=nothing,
            )  # fmt: skip

        return await self.operations.run("flush_cache", {}, work, key=key)

    async def load_adapter(
        self, name: str, path: str, *, version: str | None = None, key: str | None = None
    ) -> Operation:
        """Serves an adapter on every worker, swapping one of that name, and proves it.

        Raises Conflict for the name of the model itself, and while another operation on an adapter
        of that name is under way.
        """
        check_adapter_name(name)
        if version is not None:
            check_label(version, "version")

        async def work(operation: Operation) -> None:
            real = resolve(path, self._roots, "lora_path")
            await check_not_base(self.pool, name)
            spec = await load_everywhere(
                self.serving(), name, real, version, before=self.desired.adapters.get(name),
                budget=self.budget, operation=operation, quarantine=self.quarantine,
            )  # fmt: skip
            adapters = {**self.desired.adapters, name: spec}
            await self.decide(msgspec.structs.replace(self.desired, adapters=adapters))
            operation.version = spec.label

        request = {"lora_name": name, "lora_path": path, "version": version}
        return await self.operations.run(
            "load_lora_adapter", request, work, key=key, alone="lora_name"
        )

    async def unload_adapter(self, name: str, *, key: str | None = None) -> Operation:
        """Stops serving an adapter everywhere. Raises NotFound when nobody has it."""

        async def work(operation: Operation) -> None:
            if name not in self.desired.adapters:
                self.serving()
                raise NotFound(f"adapter {name!r} is not loaded", param="lora_name")
            # Decided first: a worker that fails now is brought up without it.
            adapters = {k: v for k, v in self.desired.adapters.items() if k != name}
            await self.decide(msgspec.structs.replace(self.desired, adapters=adapters))
            await unload_everywhere(
                self.serving(), name,
                budget=self.budget, operation=operation, quarantine=self.quarantine,
            )  # fmt: skip

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
        """Has every worker join a broadcast group whose rank 0 is the trainer."""
        if backend not in ("gloo", "nccl"):
            raise BadRequest(f"backend is {backend!r}: expected gloo or nccl", param="backend")

        async def work(operation: Operation) -> None:
            workers = self.serving()
            ranks = {worker: rank for rank, worker in enumerate(workers, start=1)}

            async def call(worker: Worker) -> None:
                rank, size = ranks[worker], len(workers) + 1
                how = Broadcaster(host, port, rank, size, group, backend, seconds)
                await worker.control.join_group(how)

            await everywhere(
                "join", workers, call, seconds + 10, operation, self.quarantine, undo=nothing
            )

        request = {"host": host, "port": str(port), "group": group}
        return await self.operations.run("init_broadcaster", request, work, key=key)

    # Helpers

    def serving(self) -> list[Worker]:
        """Raises Unavailable when there is none: an operation over no workers has failed."""
        workers = [worker for worker in self.workers if worker.serves]
        if not workers:
            raise Unavailable(f"none of {len(self.workers)} workers is serving")
        return workers

    async def decide(self, desired: Desired) -> None:
        """Has the fleet be so from now on. Raises Unavailable when it cannot be recorded."""
        await self._store.save(desired)
        self.desired = desired
