"""Take-over of serving workers by a new leader: no change stays half done.

The earlier leader may have died, or may only be slow and still send commands. So each worker is
first sent the new generation, in a pause that keeps its requests: from then on it refuses commands
of the earlier leader. Then its state is read, corrected if needed, and it is resumed. Its requests
wait, and none is lost.
"""

from __future__ import annotations

from lockstep.backends.admin import Fenced
from lockstep.fleet.fan_out import PhaseBudgets, Quarantine, run_phase
from lockstep.fleet.update.bring_up import restore
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Desired
from lockstep.tokens.errors import Conflict
from lockstep.tokens.operation import Operation

LONGEST_SECONDS = 10.0
STRAGGLER_SECONDS = 1.0
"""Seconds after most others. The fleet has no leader meanwhile, and late workers are brought up
later."""


async def take_over(
    workers: list[Worker], desired: Desired, quarantine: Quarantine, budget: PhaseBudgets
) -> None:
    """Bring every worker to the desired state; quarantine those that fail, to be brought up later.
    This finishes an update that was recorded before its leader ended, and undoes any other."""
    if desired.version is None or not workers:
        return
    operation = Operation("", "take_over", {})
    _, failed = await run_phase(
        "take over", workers, lambda worker: _correct(worker, desired),
        min(budget.commit, LONGEST_SECONDS), operation, straggler=STRAGGLER_SECONDS,
    )  # fmt: skip
    for worker, error in failed.items():
        quarantine(worker, f"the new leader could not take it over: {error.message}")


async def _correct(worker: Worker, desired: Desired) -> None:
    control = worker.control
    was_paused = (await control.view()).paused is not False
    in_place = isinstance(control, Fenced) and control.probes_while_paused
    if in_place:
        # This pause carries the new generation. Only after it the view is final: a slow command of
        # the earlier leader may still change the worker before, and is refused after.
        await control.pause("keep")
    view = await control.view()
    labels = {name: spec.label for name, spec in desired.adapters.items()}
    right = (
        view.version == desired.version and view.staged is None and dict(view.adapters) == labels
    )
    if not in_place:
        if not right:
            raise Conflict(f"it holds version {view.version!r}, and {desired.version!r} is desired")
        return
    # A worker that was running under the right label had proved it before it was resumed.
    if was_paused or not right:
        await restore(worker, desired)
    else:
        worker.version = desired.version
    if desired.paused is not None:
        await control.pause(desired.paused)
    else:
        await control.resume()
