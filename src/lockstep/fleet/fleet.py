"""The fleet: workers that all serve one agreed state, and the operations that change it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import time
from typing import Any, Literal

import msgspec

from lockstep.backends.admin import Admin, Broadcaster, PauseMode, Source, WorkerView
from lockstep.checkpoint.validate import resolve
from lockstep.fleet.control.desired import Desired, Reference, StateStore
from lockstep.fleet.control.lease import Lease
from lockstep.fleet.control.operations import Operations
from lockstep.fleet.member import Member, each
from lockstep.fleet.routing.pool import Pool, Worker
from lockstep.fleet.update.adapters import load_everywhere, prove_again, unload_everywhere
from lockstep.fleet.update.bring_up import bring_up
from lockstep.fleet.update.new_weights import WeightReader
from lockstep.fleet.update.proof import BUILTIN, CLOSE, scores_of
from lockstep.fleet.update.transaction import PhaseBudgets, Transaction
from lockstep.tokens.errors import BadRequest, Conflict, LockstepError, NotFound, Unavailable
from lockstep.tokens.operation import Operation
from lockstep.tokens.versions import check_adapter_name, check_label

log = logging.getLogger(__name__)
LEASE_SECONDS = 600.0


class Fleet:
    """Workers under one desired state. Use it as an async context manager.

    A worker gets traffic (through `pool`) only while it holds the desired version and adapters,
    proved. `roots` are the directories weights may come from; none given: any.
    """

    def __init__(
        self,
        pool: Pool,
        store: StateStore | None = None,
        *,
        roots: Sequence[Path] = (),
        budget: PhaseBudgets | None = None,
        lease_seconds: float = LEASE_SECONDS,
        model_dir: Path | None = None,
    ) -> None:
        """`model_dir` is where the weights are that the workers start with, if that is known."""
        self.pool = pool
        self.members: dict[str, Member] = {}
        self._store = store or StateStore()
        self._roots = tuple(Path(root).resolve() for root in roots or ("/",))
        self._weights = WeightReader(self._roots, model_dir)
        self._budget = budget or PhaseBudgets()
        self._lease_seconds = lease_seconds
        self.desired = self._store.desired()
        self.agreement = pool.agreement
        for version in self.desired.agreed:
            self.agreement.add(version)
        self.operations = Operations(self._store)
        self._lease = Lease(self._end_pause)
        pool.gate(self._gate)

    async def __aenter__(self) -> Fleet:
        self._lease.watch(self.desired.lease_until)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lease.watch(None)
        await self.operations.close(self._budget.commit)
        for member in self.members.values():
            await member.admin.close()
        self._store.close()

    # Membership

    async def add(
        self, url: str, admin: Admin, *, worker_id: str | None = None, **options: Any
    ) -> Member:
        """Takes a worker in; it serves once it was brought to the desired state and proved.

        `options` are those of the pool. Raises Conflict when the id exists.
        """
        name = worker_id or url.partition("://")[2].rstrip("/")
        if name in self.members:
            raise Conflict(f"there is a worker {name!r} already: remove it first", param="id")
        member = Member(name, url, admin)
        self.members[name] = member
        try:
            await self.pool.add(url, worker_id=name, **options)
        except BaseException:
            self.members.pop(name, None)
            raise
        return member

    async def remove(self, worker_id: str, *, drain_seconds: float = 30.0) -> None:
        """Gives it nothing new, waits for what it has, forgets it. Raises NotFound."""
        member = self.member(worker_id)
        member.become("draining")
        try:
            await self.pool.remove(worker_id, drain_seconds=drain_seconds)
        finally:
            self.members.pop(worker_id, None)
            await member.admin.close()

    def member(self, worker_id: str) -> Member:
        if worker_id not in self.members:
            known = ", ".join(self.members) or "none"
            raise NotFound(f"there is no worker {worker_id!r}; known are {known}", param="worker")
        return self.members[worker_id]

    def quarantine(self, member: Member, reason: str) -> None:
        """No traffic for it until it was brought to the desired state and proved again."""
        if self._is_here(member):
            log.warning("worker %s is quarantined: %s", member.id, reason)
            member.become("quarantined", reason)
            self.pool.leave_out(member.id, reason)

    async def _gate(self, worker: Worker) -> None:
        """Brings a worker up before it serves. Raises what keeps it out."""
        member = self.members.get(worker.id)
        if member is None:
            return
        if member.state != "joining":
            # What runs now may be acting on this worker; what comes next leaves it alone.
            async with self.operations.lock:
                if not self._is_here(member):
                    raise Unavailable(f"worker {member.id} is being removed")
                member.become("syncing", member.reason)
        while True:
            try:
                async with asyncio.timeout(self._budget.stage + self._budget.prove):
                    held = await bring_up(member, self.desired, self._adopt)
            except TimeoutError:
                member.become("quarantined", "it took too long to be brought up")
                raise Unavailable(f"worker {member.id} took too long to be brought up") from None
            except LockstepError as error:
                member.become("quarantined", error.message)
                raise Unavailable(f"worker {member.id} is not ready: {error.message}") from error
            async with self.operations.lock:
                if self.desired == held:
                    member.become("serving")
                    return

    async def _adopt(self, member: Member, view: WorkerView) -> Desired:
        """The first worker's own state becomes the fleet's, when there is none yet."""
        said = await scores_of(member, BUILTIN)
        async with self.operations.lock:
            if self.desired.version is None:
                version = view.version or "default"
                await self._decide(
                    Desired().agree(version, None, None, Reference(BUILTIN, said, CLOSE))
                )
                self.agreement.add(version)
            return self.desired

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

        `version` defaults to the directory's name. A probe beside the checkpoint
        (probe.safetensors) is what the workers must reproduce. Raises what stopped it when nothing
        changed; its operation says who and why. A version that is served already is not loaded
        again.
        """
        if (weight_dir is None) == (source is None):
            raise BadRequest("give a weight_dir, or another source", param="weight_dir")
        named = version or (Path(weight_dir).name if weight_dir else "")
        check_label(named, "version")
        request = {"weight_dir": weight_dir, "version": named, "mode": mode}

        async def work(operation: Operation) -> None:
            operation.version = named
            members = self._serving()
            new = await self._weights.read(weight_dir, source, named, self.desired)
            if new is None:
                return
            transaction = Transaction(
                members,
                new.source,
                named,
                new.proof,
                operation=operation,
                quarantine=self.quarantine,
                hold=self._hold,
                mode=mode,
                paused=self.desired.paused,
                budget=self._budget,
            )

            def agree(reference: Reference) -> None:
                desired = self.desired.agree(named, new.path, new.digest, reference)
                self._store.save(desired)
                self.desired = desired
                self.agreement.add(named)

            await transaction.run(agree)
            await self._prove_adapters(operation)

        return await self.operations.run("update_weights", request, work, key=key)

    async def _prove_adapters(self, operation: Operation) -> None:
        """What adapters answer on the new weights: the workers must agree on that too."""
        for name, spec in self.desired.adapters.items():
            reference = await prove_again(
                self._serving(), name, budget=self._budget, operation=operation,
                quarantine=self.quarantine,
            )  # fmt: skip
            renewed = msgspec.structs.replace(spec, reference=reference)
            adapters = {**self.desired.adapters, name: renewed}
            await self._decide(msgspec.structs.replace(self.desired, adapters=adapters))

    async def pause(
        self,
        mode: PauseMode = "keep",
        *,
        lease_seconds: float | None = None,
        key: str | None = None,
    ) -> Operation:
        """Returns when no worker generates any more. The pause ends by itself after the lease."""
        if mode not in ("abort", "wait", "keep"):
            raise BadRequest(f"mode is {mode!r}: expected abort, wait or keep", param="mode")
        lease = self._lease_seconds if lease_seconds is None else lease_seconds
        if not 0 < lease < math.inf:
            raise BadRequest(f"lease_seconds is {lease}: expected > 0", param="lease_seconds")

        async def work(operation: Operation) -> None:
            members, before = self._serving(), self.desired

            async def call(member: Member) -> None:
                await member.admin.pause(mode)

            await self._decide(
                msgspec.structs.replace(before, paused=mode, lease_until=time() + lease)
            )
            try:
                await self._everywhere("pause", members, call, self._budget.pause, operation)
            except LockstepError:
                await self._decide(before)  # or those that return would be paused for nobody
                raise
            finally:
                self._lease.watch(self.desired.lease_until)

        return await self.operations.run("pause", {"mode": mode}, work, key=key)

    async def resume(self, *, key: str | None = None) -> Operation:
        """Lets every worker generate again; no error when none was paused."""

        async def work(operation: Operation) -> None:
            self._serving()
            await self._decide(msgspec.structs.replace(self.desired, paused=None, lease_until=None))
            await self._resume(operation)

        return await self.operations.run("resume", {}, work, key=key)

    async def _resume(self, operation: Operation) -> None:
        async def call(member: Member) -> None:
            await member.admin.resume()

        await self._everywhere("resume", self._serving(), call, self._budget.resume, operation)

    async def flush(self, *, key: str | None = None) -> Operation:
        """Forgets cached prefixes on every worker."""

        async def work(operation: Operation) -> None:
            async def call(member: Member) -> None:
                await member.admin.flush()

            await self._everywhere("flush", self._serving(), call, self._budget.resume, operation)

        return await self.operations.run("flush_cache", {}, work, key=key)

    async def load_adapter(
        self, name: str, path: str, *, version: str | None = None, key: str | None = None
    ) -> Operation:
        """Serves an adapter on every worker, swapping one of that name, and proves it."""
        check_adapter_name(name)
        if version is not None:
            check_label(version, "version")

        async def work(operation: Operation) -> None:
            real = resolve(path, self._roots)
            spec = await load_everywhere(
                self._serving(), name, real, version,
                budget=self._budget, operation=operation, quarantine=self.quarantine,
            )  # fmt: skip
            adapters = {**self.desired.adapters, name: spec}
            await self._decide(msgspec.structs.replace(self.desired, adapters=adapters))
            operation.version = spec.label

        request = {"lora_name": name, "lora_path": path, "version": version}
        return await self.operations.run("load_lora_adapter", request, work, key=key)

    async def unload_adapter(self, name: str, *, key: str | None = None) -> Operation:
        """Stops serving an adapter everywhere. Raises NotFound when nobody has it."""

        async def work(operation: Operation) -> None:
            if name not in self.desired.adapters:
                self._serving()
                raise NotFound(f"adapter {name!r} is not loaded", param="lora_name")
            # Decided first: a worker that fails now is brought up without it.
            adapters = {k: v for k, v in self.desired.adapters.items() if k != name}
            await self._decide(msgspec.structs.replace(self.desired, adapters=adapters))
            await unload_everywhere(
                self._serving(), name,
                budget=self._budget, operation=operation, quarantine=self.quarantine,
            )  # fmt: skip

        return await self.operations.run("unload_lora_adapter", {"lora_name": name}, work, key=key)

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
            members = self._serving()
            ranks = {member: rank for rank, member in enumerate(members, start=1)}

            async def call(member: Member) -> None:
                rank, size = ranks[member], len(members) + 1
                how = Broadcaster(host, port, rank, size, group, backend, seconds)
                await member.admin.join_group(how)

            await self._everywhere("join", members, call, seconds + 10, operation)

        request = {"host": host, "port": str(port), "group": group}
        return await self.operations.run("init_broadcaster", request, work, key=key)

    # Helpers

    def _is_here(self, member: Member) -> bool:
        """Whether it was not removed meanwhile, nor is about to be."""
        return self.members.get(member.id) is member and member.state != "draining"

    def _hold(self, member: Member, held: bool) -> None:
        if self._is_here(member):
            self.pool.hold(member.id, held)

    def _serving(self) -> list[Member]:
        """Raises Unavailable when there is none: an operation over no workers has failed."""
        members = [member for member in self.members.values() if member.state == "serving"]
        if not members:
            raise Unavailable(f"none of {len(self.members)} workers is serving")
        return members

    async def _everywhere(
        self,
        phase: str,
        members: list[Member],
        call: Callable[[Member], Awaitable[None]],
        seconds: float,
        operation: Operation,
    ) -> None:
        done, failed = await each(phase, members, call, seconds, operation)
        for member, error in failed.items():
            operation.workers[member.id].status = "quarantined"
            self.quarantine(member, f"{phase} failed: {error.message}")
        if not done:
            raise Unavailable(f"{phase} failed on all {len(failed)} workers")

    async def _decide(self, desired: Desired) -> None:
        await asyncio.to_thread(self._store.save, desired)
        self.desired = desired

    async def _end_pause(self, until: float) -> None:
        """Resumes, unless the pause was renewed. Workers that are out follow as they return."""

        async def work(operation: Operation) -> None:
            if self.desired.lease_until != until:
                return
            log.warning("the lease of a pause has ended: the fleet resumes")
            await self._decide(msgspec.structs.replace(self.desired, paused=None, lease_until=None))
            if any(member.state == "serving" for member in self.members.values()):
                await self._resume(operation)

        await self.operations.run("end_of_lease", {}, work)
