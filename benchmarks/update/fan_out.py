"""An update of many simulated workers in one fleet, beside what the slowest of them takes."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time

import uvloop
from tests.simulator.pool import SimulatedPool
from tests.simulator.workers import (
    FIRST,
    SimulatedWorker,
    StagedProbeAdmin,
    contents,
    score,
    write_checkpoint,
)

from benchmarks.table import Row
from lockstep.checkpoint.manifest import PROBE
from lockstep.checkpoint.probe import Probe
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.update.proof import BUILTIN

COUNTS = (10, 100, 1000)
ROUNDS = 3
CALL_SECONDS = (0.1, 0.5)
"""Between these any call takes any time: seven calls make an update of some seconds."""


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        made = [measure(Path(directory), count) for count in COUNTS]
    return [
        Row(
            what=f"update of {count:,} workers, fan-out",
            against="the slowest of them",
            ours=ours,
            theirs=slowest,
            unit="s",
            note=f"simulated workers, calls of {CALL_SECONDS[0]} to {CALL_SECONDS[1]} s; "
            f"{1e6 * cpu / count:.0f} us of the fleet's CPU for each",
        )
        for count, (ours, slowest, cpu) in zip(COUNTS, made, strict=True)
    ]


def measure(directory: Path, count: int) -> tuple[float, float, float]:
    """Medians: seconds of an update, those of its slowest worker alone, CPU seconds in it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the gateway's
        rounds = [runner.run(update(directory, count, seed)) for seed in range(ROUNDS)]
    seconds, slowest, cpu = (median(column) for column in zip(*rounds, strict=True))
    return seconds, slowest, cpu


async def update(directory: Path, count: int, seed: int) -> tuple[float, float, float]:
    """One update of `count` workers, whose calls take times of that seed."""
    rng = random.Random(seed)
    spent: defaultdict[str, float] = defaultdict(float)

    def latency(worker: SimulatedWorker) -> float:
        seconds = rng.uniform(*CALL_SECONDS)
        spent[worker.name] += seconds
        return seconds

    first = contents(write_checkpoint(directory / FIRST, 0))
    new = write_checkpoint(directory / "new", 1)
    scores = tuple(tuple(score(ids, contents(new))) for ids in BUILTIN)
    Probe(BUILTIN, scores, 0.0).write(new / PROBE)
    workers = [SimulatedWorker(f"w{at}", first) for at in range(count)]
    pool = SimulatedPool(processes={worker.name: worker for worker in workers})
    async with Fleet(pool) as fleet:
        for worker in workers:
            admin = StagedProbeAdmin(worker)
            await fleet.add(admin.url, admin, worker_id=worker.name)
        for worker in workers:
            worker.latency = partial(latency, worker)
        begun, busy = perf_counter(), thread_time()
        await fleet.update_weights(str(new), version="new")
        seconds, cpu = perf_counter() - begun, thread_time() - busy
        if {worker.version for worker in workers} != {"new"}:
            raise RuntimeError("not all workers were updated")
    return seconds, max(spent.values()), cpu
