"""Pauses of a fleet: all workers stop, until they are resumed or the pause's lease ends."""

from __future__ import annotations

import logging
import math
from time import time

import msgspec

from lockstep.backends.admin import PauseMode
from lockstep.fleet.control.lease import Lease
from lockstep.fleet.fan_out import run_or_quarantine
from lockstep.fleet.state import FleetState
from lockstep.storage.desired_state import Desired
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable
from lockstep.tokens.operation import Operation

log = logging.getLogger(__name__)


class Pauses:
    """Pauses and resumes a fleet. A pause without a lease of its own lasts `lease_seconds`."""

    def __init__(self, state: FleetState, lease_seconds: float) -> None:
        self._state, self._lease_seconds = state, lease_seconds
        self._lease = Lease(self._end)

    def watch(self, desired: Desired | None) -> None:
        """End the desired pause when its lease ends. None stops watching."""
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
            await self._pause(mode, lease, operation)

        return await self._state.operations.run("pause", {"mode": mode}, work, key=key)

    async def _pause(self, mode: PauseMode, lease: float, operation: Operation) -> None:
        state = self._state
        workers, before = state.serving(), state.desired
        # Recorded before any worker pauses: if this process dies now, the next leader still knows
        # of the pause and ends it when its lease does.
        await state.decide(
            msgspec.structs.replace(
                before, paused=mode, lease_until=time() + lease, lease_seconds=lease
            )
        )
        try:
            await run_or_quarantine(
                "pause", workers, lambda worker: worker.control.pause(mode),
                state.budget.pause, operation, state.quarantine,
                undo=lambda worker: worker.control.resume(),
                undo_seconds=state.budget.resume,
            )  # fmt: skip
        except LockstepError:
            # Otherwise workers that return would be paused, and no caller would resume them.
            await state.decide(before)
            raise
        finally:
            self._lease.watch(state.desired.lease_until, lease)

    async def resume(self, key: str | None) -> Operation:
        """See Fleet.resume."""

        async def work(operation: Operation) -> None:
            self._state.serving()
            await self._resume(operation)

        return await self._state.operations.run("resume", {}, work, key=key, unrecorded=True)

    async def _resume(self, operation: Operation) -> None:
        """Resume the serving workers. Others are resumed when they are brought up."""
        state = self._state
        # Adopted first: a store that cannot be written must not keep a fleet paused. At worst the
        # next process pauses again, until the lease that it reads ends.
        state.adopt(state.desired.resumed)
        try:
            await state.decide(state.desired)
        except Unavailable as error:
            operation.warnings.append(f"the end of the pause was not recorded: {error.message}")
        workers = [worker for worker in state.workers if worker.serves]
        if workers:
            await run_or_quarantine(
                "resume", workers, lambda worker: worker.control.resume(),
                state.budget.resume, operation, state.quarantine,
            )  # fmt: skip

    async def _end(self, until: float) -> None:
        """Resume the fleet, unless the pause that ends at `until` was renewed meanwhile."""

        async def work(operation: Operation) -> None:
            if self._state.desired.lease_until != until:
                return
            log.warning("the lease of a pause ended: resuming the fleet")
            await self._resume(operation)

        await self._state.operations.run("end_of_lease", {}, work, unrecorded=True)
