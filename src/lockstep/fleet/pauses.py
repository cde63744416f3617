"""Pauses of a fleet: everybody stops, and goes on when told to or when the lease has ended."""

from __future__ import annotations

import logging
import math
from time import time
from typing import TYPE_CHECKING

import msgspec

from lockstep.backends.admin import PauseMode
from lockstep.fleet.control.lease import Lease
from lockstep.fleet.fan_out import everywhere
from lockstep.storage.desired_state import Desired
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable
from lockstep.tokens.operation import Operation

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet

log = logging.getLogger(__name__)


class Pauses:
    """Pauses and resumes `fleet`; a pause lasts `lease_seconds` unless it says otherwise."""

    def __init__(self, fleet: Fleet, lease_seconds: float) -> None:
        self._fleet, self._lease_seconds = fleet, lease_seconds
        self._lease = Lease(self._end)

    def watch(self, desired: Desired | None) -> None:
        """Ends the pause that is desired when its lease does; None: ends none."""
        if desired is None:
            self._lease.watch(None)
        else:
            self._lease.watch(desired.lease_until, desired.lease_seconds)

    async def pause(
        self, mode: PauseMode, lease_seconds: float | None, key: str | None
    ) -> Operation:
        """See Fleet.pause."""
        if mode not in ("abort", "wait", "keep"):
            raise BadRequest(f"mode is {mode!r}: expected abort, wait or keep", param="mode")
        lease = self._lease_seconds if lease_seconds is None else lease_seconds
        if not 0 < lease < math.inf:
            raise BadRequest(f"lease_seconds is {lease}: expected > 0", param="lease_seconds")

        async def work(operation: Operation) -> None:
            workers, before = self._fleet.serving(), self._fleet.desired
            await self._fleet.decide(
                msgspec.structs.replace(
                    before, paused=mode, lease_until=time() + lease, lease_seconds=lease
                )
            )
            try:
                await everywhere(
                    "pause", workers, lambda worker: worker.control.pause(mode),
                    self._fleet.budget.pause, operation, self._fleet.quarantine,
                    undo=lambda worker: worker.control.resume(),
                    undo_seconds=self._fleet.budget.resume,
                )  # fmt: skip
            except LockstepError:
                await self._fleet.decide(before)  # or those that return would be paused for nobody
                raise
            finally:
                self._lease.watch(self._fleet.desired.lease_until, lease)

        return await self._fleet.operations.run("pause", {"mode": mode}, work, key=key)

    async def resume(self, key: str | None) -> Operation:
        """See Fleet.resume."""

        async def work(operation: Operation) -> None:
            self._fleet.serving()
            await self._resume(operation)

        return await self._fleet.operations.run("resume", {}, work, key=key, unrecorded=True)

    async def _resume(self, operation: Operation) -> None:
        """Resumes those that serve; the others follow as they return.

        A state that cannot be written does not keep a fleet paused: at worst the next process
        pauses until the lease that it reads has ended.
        """
        self._fleet.desired = self._fleet.desired.resumed
        try:
            await self._fleet.decide(self._fleet.desired)
        except Unavailable as error:
            operation.warnings.append(f"the end of the pause was not recorded: {error.message}")
        workers = [worker for worker in self._fleet.workers if worker.serves]
        if workers:
            await everywhere(
                "resume", workers, lambda worker: worker.control.resume(),
                self._fleet.budget.resume, operation, self._fleet.quarantine,
            )  # fmt: skip

    async def _end(self, until: float) -> None:
        """Resumes, unless the pause was renewed. Workers that are out follow as they return."""

        async def work(operation: Operation) -> None:
            if self._fleet.desired.lease_until != until:
                return
            log.warning("the lease of a pause has ended: the fleet resumes")
            await self._resume(operation)

        await self._fleet.operations.run("end_of_lease", {}, work, unrecorded=True)
