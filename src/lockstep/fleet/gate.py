"""The gate before traffic: a worker passes once it holds and has proved the desired state."""

from __future__ import annotations

import asyncio

import msgspec

from lockstep.backends.admin import WorkerView
from lockstep.fleet.state import FleetState
from lockstep.fleet.update.bring_up import bring_up, check_first_weights
from lockstep.fleet.update.proof import BUILTIN, CLOSE, scores_of
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Desired, Reference
from lockstep.tokens.errors import LockstepError, Superseded, Unavailable


class WorkerGate:
    """Brings workers to the desired state. Used by the leader only."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self.obeyed = False
        """Whether a worker has accepted a command since this gateway became leader."""

    async def bring_up(self, worker: Worker) -> None:
        """Bring a worker to the desired state and prove it. Raises Unavailable with the reason."""
        state = self._state
        if worker.state != "joining":
            # The operation that runs now may be acting on this worker. Later operations ignore
            # workers that are not serving when they start, so the lock is only held here.
            async with state.operations.lock:
                worker.become("syncing", worker.reason)
        while True:
            error: LockstepError
            try:
                async with asyncio.timeout(state.budget.stage + state.budget.prove):
                    await self._check_generation(worker)
                    reached = await bring_up(
                        worker, state.desired, self._adopt, state.require_proof
                    )
            except TimeoutError:
                error = Unavailable("it took too long to be brought up")
            except LockstepError as raised:
                error = raised
            else:
                self.obeyed = True
                # An update may have changed the desired state while this worker was being brought
                # to the earlier one: then it starts over.
                async with state.operations.lock:
                    if state.desired == reached:
                        return
                continue
            # A worker that was ejected or removed meanwhile keeps the state it got then.
            if worker.state in ("syncing", "proving"):
                worker.become("quarantined", error.message)
            raise Unavailable(f"worker {worker.id} is not ready: {error.message}") from error

    async def _check_generation(self, worker: Worker) -> None:
        """Rise above the generation that the worker obeys, or raise Superseded.

        A gateway that has just started was obeyed by no worker: it takes a higher number than any
        it finds. A gateway that was obeyed before has been superseded, and must not come back.
        """
        state = self._state
        view = await worker.control.view()
        highest, own = view.generation, state.desired.generation
        # The same number may be another gateway's: one whose clock was ahead stored a high number,
        # another one rose above it on the workers, and the first took the next one at its restart.
        if highest < own or not highest:
            return
        if highest == own and view.gateway == state.leadership.holder:
            return
        if self.obeyed:
            state.operations.superseded = True
            raise Superseded(
                f"it obeys generation {highest} of another gateway, and this one is "
                f"{own}: stop the other gateway and restart this one, or "
                "remove the worker here"
            )
        async with state.operations.lock:
            generation = await state.leadership.rise_above(highest)
            await state.decide(msgspec.structs.replace(state.desired, generation=generation))

    async def _adopt(self, worker: Worker, view: WorkerView) -> Desired:
        """Make the first worker's own state the desired state, if there is none yet."""
        state = self._state
        if state.expected is not None:
            await check_first_weights(worker, state.expected)
        scores = await scores_of(worker, BUILTIN)
        async with state.operations.lock:
            if state.desired.version is None:
                version = view.version or "default"
                first = Desired(generation=state.desired.generation)
                await state.decide(
                    first.agree(version, None, None, Reference(BUILTIN, scores, CLOSE))
                )
                state.pool.accepted.accept(version)
            return state.desired
