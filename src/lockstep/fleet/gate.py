"""The gate before traffic: a worker passes when it holds what is desired, and has proved it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from lockstep.backends.admin import WorkerView
from lockstep.fleet.update.bring_up import bring_up
from lockstep.fleet.update.proof import BUILTIN, CLOSE, scores_of
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Desired, Reference
from lockstep.tokens.errors import LockstepError, Superseded, Unavailable

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet


class WorkerGate:
    """Brings workers of `fleet` up. `obeyed`: one has, since this gateway leads."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.obeyed = False

    async def bring_up(self, worker: Worker) -> None:
        """Leaves the worker proved, or raises what keeps it out."""
        if not self._fleet.leads:
            return self._fleet.replica.admit(worker)
        if worker.state != "joining":
            # The operation that runs now may be acting on this worker; later ones leave alone what
            # is not serving when they start.
            async with self._fleet.operations.lock:
                worker.become("syncing", worker.reason)
        while True:
            error: LockstepError
            try:
                async with asyncio.timeout(self._fleet.budget.stage + self._fleet.budget.prove):
                    await self._take_over(worker)
                    reached = await bring_up(worker, self._fleet.desired, self._adopt)
            except TimeoutError:
                error = Unavailable("it took too long to be brought up")
            except LockstepError as raised:
                error = raised
            else:
                self.obeyed = True
                # What is desired may have changed meanwhile: then once more.
                async with self._fleet.operations.lock:
                    if self._fleet.desired == reached:
                        return
                continue
            # One that was ejected or removed meanwhile is what it became then.
            if worker.state in ("syncing", "proving"):
                worker.become("quarantined", error.message)
            raise Unavailable(f"worker {worker.id} is not ready: {error.message}") from error

    async def _take_over(self, worker: Worker) -> None:
        """Raises Superseded when the worker obeys another gateway by now.

        A gateway that just started has not been obeyed by any worker yet: it takes a number above
        those that it finds. One that was may have been superseded since, and must not come back.
        """
        highest = (await worker.control.view()).generation
        if highest <= self._fleet.desired.generation:
            return
        if self.obeyed:
            self._fleet.operations.superseded = True
            raise Superseded(
                f"it obeys generation {highest} of another gateway, and this one is "
                f"{self._fleet.desired.generation}: stop the other one and start this one anew, or "
                "remove the worker here"
            )
        async with self._fleet.operations.lock:
            generation = await self._fleet.leadership.rise_above(highest)
            await self._fleet.decide(
                msgspec.structs.replace(self._fleet.desired, generation=generation)
            )

    async def _adopt(self, worker: Worker, view: WorkerView) -> Desired:
        """The first worker's own state becomes the fleet's, when there is none yet."""
        scores = await scores_of(worker, BUILTIN)
        async with self._fleet.operations.lock:
            if self._fleet.desired.version is None:
                version = view.version or "default"
                first = Desired(generation=self._fleet.desired.generation)
                await self._fleet.decide(
                    first.agree(version, None, None, Reference(BUILTIN, scores, CLOSE))
                )
                self._fleet.pool.accepted.accept(version)
            return self._fleet.desired
