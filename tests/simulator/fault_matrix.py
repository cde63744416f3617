"""`python -m tests.simulator.fault_matrix`: every fault in every phase of an update.

After each, scores tell what every worker that gets traffic really holds. A fault ends
well in one of two ways: the update happened, or it did not; and either way all of them hold the
weights that the fleet's label means.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from time import monotonic
from typing import get_args

from lockstep.checkpoint.manifest import PROBE
from lockstep.checkpoint.probe import Probe
from lockstep.fleet.fan_out import PhaseBudgets
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.update.proof import BUILTIN
from lockstep.tokens.errors import LockstepError
from tests.simulator.pool import SimulatedPool
from tests.simulator.workers import (
    FIRST,
    Kind,
    SimulatedAdmin,
    SimulatedWorker,
    StagedProbeAdmin,
    contents,
    score,
    write_checkpoint,
)

BUDGET = PhaseBudgets(stage=0.4, pause=0.4, commit=0.4, prove=0.4, resume=0.4)
PHASES = {
    "baseline": ("probe", 1),
    "stage": ("stage", 1),
    "prove staged": ("probe staged", 1),
    "quiesce": ("pause", 1),
    "commit": ("commit", 1),
    "prove": ("probe", 2),
    "resume": ("resume", 1),
}
"""The call, counted from the beginning of the update, in which each phase can be struck."""
NEW = "step_1"
LOOKS = 10
HEAL_SECONDS = 60.0
"""On a busy machine a worker may be too slow for its budget at times, and is looked at again."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One update under one fault: with a trainer's probe or without, in a paused fleet or not.

    `mute` workers take no probe while they are paused; those of `probes_staged` take one of what
    they have staged. No driver is of both kinds.
    """

    phase: str
    kind: Kind
    probe: bool
    paused: bool
    mute: bool
    probes_staged: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended. `wrong` says what a worker that got traffic should not have held."""

    trial: Trial
    struck: bool
    updated: bool
    serving: int
    healed: int
    wrong: tuple[str, ...]


def trials() -> Iterator[Trial]:
    for phase, kind in product(PHASES, get_args(Kind)):
        for probe, paused, mute, probes_staged in product((True, False), repeat=4):
            # Where a dialect has no order of pauses and resumes, as vLLM's, nobody can tell one
            # that arrives late from a new one.
            unordered = mute and kind == "late" and phase in ("quiesce", "resume")
            if (
                (probes_staged or phase != "prove staged")
                and not (mute and probes_staged)
                and not unordered
            ):
                yield Trial(phase, kind, probe, paused, mute, probes_staged)


def wrong_with(
    fleet: Fleet,
    pool: SimulatedPool,
    meaning: dict[str, str],
    *,
    settled: bool = True,
) -> list[str]:
    """What is wrong with the workers that get traffic; `meaning` maps labels to weights.

    A worker that was started anew a moment ago generates under its old label until the pool looks
    at it. That label is true, and refused as not accepted: it counts only once all is `settled`.
    """
    problems = []
    desired = fleet.desired
    adapters = {name: spec.label for name, spec in desired.adapters.items()}
    for worker in pool.routed:
        process = worker.process
        if not worker.routable or not process.alive:
            continue
        if process.weights != meaning.get(process.version):
            problems.append(f"{worker.id} says {process.version!r} and holds other weights")
        if not settled and not worker.seen:
            continue
        if process.version != desired.version:
            problems.append(
                f"{worker.id} serves {process.version!r}, accepted is {desired.version!r}"
            )
        scores = [score(ids, meaning.get(desired.version or "", "?")) for ids in BUILTIN]
        if process.probe(BUILTIN, None) != scores:
            problems.append(f"{worker.id} does not score as {desired.version!r}")
        if process.adapters != adapters:
            problems.append(f"{worker.id} has adapters {process.adapters}, agreed are {adapters}")
        if process.paused != (desired.paused is not None):
            problems.append(f"{worker.id} is paused: {process.paused}, agreed is {desired.paused}")
    return problems


async def attempt(trial: Trial, directory: Path, meaning: dict[str, str]) -> Outcome:
    """One update of three workers, the first of which is struck."""
    workers = [SimulatedWorker(f"w{index}", meaning[FIRST]) for index in range(3)]
    pool = SimulatedPool(processes={worker.name: worker for worker in workers})
    async with Fleet(pool, budget=BUDGET) as fleet:
        for worker in workers:
            driver = StagedProbeAdmin if trial.probes_staged else SimulatedAdmin
            admin = driver(worker, probes_while_paused=not trial.mute)
            await fleet.add(admin.url, admin, worker_id=worker.name)
        if trial.paused:
            await fleet.pause("keep")
        method, number = PHASES[trial.phase]
        workers[0].strike(method, trial.kind, number)
        updated = True
        try:
            await fleet.update_weights(str(directory / ("probed" if trial.probe else NEW)),
                                       version=NEW)  # fmt: skip
        except LockstepError:
            updated = False
        wrong = wrong_with(fleet, pool, meaning, settled=False)
        serving = sum(worker.serves for worker in pool.workers)
        if updated != (fleet.desired.version == NEW):
            wrong.append(f"updated is {updated}, and the version {fleet.desired.version!r}")
        if not workers[0].alive:
            workers[0].start()
        looks, deadline = 0, monotonic() + HEAL_SECONDS
        while looks < LOOKS or (
            monotonic() < deadline and not all(worker.serves for worker in pool.workers)
        ):
            await pool.look()
            wrong += wrong_with(fleet, pool, meaning)
            looks += 1
            if looks > LOOKS:
                await asyncio.sleep(0.1)
        healed = sum(worker.serves for worker in pool.workers)
        return Outcome(trial, workers[0].struck > 0, updated, serving, healed, tuple(wrong))


async def run(directory: Path) -> list[Outcome]:
    """Every trial."""
    first = write_checkpoint(directory / FIRST, 0)
    new = write_checkpoint(directory / NEW, 1)
    probed = write_checkpoint(directory / "probed", 1)
    meaning = {FIRST: contents(first), NEW: contents(new)}
    scores = tuple(tuple(score(ids, meaning[NEW])) for ids in BUILTIN)
    Probe(BUILTIN, scores, 0.0).write(probed / PROBE)
    outcomes = []
    for some in batched(trials(), 64):
        outcomes += await asyncio.gather(*(attempt(one, directory, meaning) for one in some))
    return outcomes


def batched(items: Iterable[Trial], size: int) -> Iterator[list[Trial]]:
    """So many at the same time: most of a trial is waiting."""
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def table(outcomes: list[Outcome]) -> str:
    """One row per phase: how many updates happened and how many did not, per kind of fault."""
    kinds = get_args(Kind)
    rows = ["phase     " + "".join(f"{kind:>15}" for kind in kinds)]
    for phase in PHASES:
        cells = []
        for kind in kinds:
            matching = [o for o in outcomes if (o.trial.phase, o.trial.kind) == (phase, kind)]
            count = Counter(o.updated for o in matching if o.struck)
            cells.append(f"{count[True]:>6} of {sum(count.values()):>4}")
        rows.append(f"{phase:<10}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(rows)


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        outcomes = asyncio.run(run(Path(directory)))
    struck = [outcome for outcome in outcomes if outcome.struck]
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    print("Updates that happened although one of three workers was struck, by phase and fault:\n")
    print(table(outcomes))
    for outcome in wrong[:20]:
        print(f"\nWRONG {outcome.trial}: {'; '.join(outcome.wrong)}")
    updated = sum(outcome.updated for outcome in struck)
    print(
        f"\n{len(struck)} faults injected: {updated} updates happened, {len(struck) - updated} "
        f"were undone, {len(wrong)} led to a mixture of weights."
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
