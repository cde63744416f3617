"""The start and the end of leading a fleet."""

from __future__ import annotations

import logging

import msgspec

from lockstep.fleet.gate import WorkerGate
from lockstep.fleet.pauses import Pauses
from lockstep.fleet.state import FleetState
from lockstep.fleet.update.take_over import take_over
from lockstep.tokens.errors import Unavailable

log = logging.getLogger(__name__)


class Leader:
    """Takes the workers of a fleet over, and stops changing them when another gateway leads."""

    def __init__(self, state: FleetState, gate: WorkerGate, pauses: Pauses) -> None:
        self._state, self._gate, self._pauses = state, gate, pauses

    async def start(self, generation: int) -> None:
        """Lead under this generation. The desired state stays. An update that an earlier leader
        left half done is finished if it was recorded, and undone if not."""
        state = self._state
        async with state.operations.lock:
            desired = await state.store.desired()
            state.pool.accepted.follow(desired.agreed)
            state.adopt(msgspec.structs.replace(desired, generation=generation))
            self._gate.obeyed = False
            try:
                await state.decide(state.desired)
            except Unavailable as error:
                if state.leadership.shared:
                    raise
                # A gateway alone may start without its disk: the workers remember the highest
                # generation, and the gate rises above it before it sends a command.
                log.warning("generation %d was not recorded: %s", generation, error.message)
            await state.store.cut_off()
            workers = [worker for worker in state.workers if worker.serves]
            await take_over(workers, state.desired, state.quarantine, state.budget)
            # Last: until the workers refuse the earlier leader, this gateway must not act as one.
            state.leads, state.pool.accepted.read_anew = True, None
        self._pauses.watch(state.desired)
        for worker in state.workers:
            if not worker.serves and not worker.leaving:
                state.pool.check(worker.id)

    async def stop(self, reason: str) -> None:
        """Change nothing any more. Pending operations fail with Unavailable and this reason."""
        self._state.leads = False
        self._pauses.watch(None)
        await self._state.operations.abandon(reason)
        for worker in self._state.workers:
            self._state.pool.hold(worker, False)
