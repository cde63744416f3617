"""What a new leader does with workers that serve: nothing that was half done stays so.

The leader before it may have died, or may only be slow and still send commands. So each worker is
first told the new number, in a pause that keeps its requests: from then on it refuses the others.
Then it is looked at, put right where it stands, and goes on. Its requests wait, and none is lost.
"""

from __future__ import annotations

from lockstep.backends.admin import Fenced
from lockstep.fleet.fan_out import PhaseBudgets, Quarantine, each
from lockstep.fleet.update.bring_up import restore
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Desired
from lockstep.tokens.errors import Conflict
from lockstep.tokens.operation import Operation

LONGEST_SECONDS = 10.0
STRAGGLER_SECONDS = 1.0
"""Beyond most others: the fleet has no leader meanwhile, and who is late is brought up later."""


async def take_over(
    workers: list[Worker], desired: Desired, quarantine: Quarantine, budget: PhaseBudgets
) -> None:
    """Leaves every worker as desired; those that cannot be are quarantined, and brought up later.

    An update that was recorded before its leader ended is thereby finished, any other is undone.
    """
    if desired.version is None or not workers:
        return
    operation = Operation("", "take_over", {})
    _, failed = await each(
        "take over", workers, lambda worker: _put_right(worker, desired),
        min(budget.commit, LONGEST_SECONDS), operation, straggler=STRAGGLER_SECONDS,
    )  # fmt: skip
    for worker, error in failed.items():
        quarantine(worker, f"the new leader could not take it over: {error.message}")


async def _put_right(worker: Worker, desired: Desired) -> None:
    control = worker.control
    was_paused = (await control.view()).paused is not False
    in_place = isinstance(control, Fenced) and control.probes_while_paused
    if in_place:
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
    # One that ran under the right label was proved before it was let run.
    if was_paused or not right:
        await restore(worker, desired)
    else:
        worker.version = desired.version
    if desired.paused is not None:
        await control.pause(desired.paused)
    else:
        await control.resume()
