"""A thousand workers are updated in the time of the slowest, and cost little memory."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

from lockstep.fleet.fan_out import PhaseBudgets
from tests.simulator.fleet import Simulation, simulated
from tests.simulator.workers import FIRST, SimulatedWorker

WORKERS = 1000
BUDGET = PhaseBudgets(stage=60.0, pause=60.0, commit=60.0, prove=60.0, resume=60.0)


@asynccontextmanager
async def many(
    directory: Path,
) -> AsyncIterator[tuple[Simulation, list[SimulatedWorker]]]:
    async with simulated(directory, 0, budget=BUDGET) as fleet:
        workers = [SimulatedWorker(f"w{at}", fleet.meaning[FIRST]) for at in range(WORKERS)]
        await fleet.add(workers[0])
        await asyncio.gather(*map(fleet.add, workers[1:]))
        assert len(fleet.serving()) == WORKERS
        yield fleet, workers


async def test_one_update_after_the_other_needs_no_more_memory(tmp_path: Path) -> None:
    async with many(tmp_path) as (fleet, workers):
        grown = []
        for version in ("a", "b"):
            gc.collect()
            tracemalloc.start()
            await fleet.update(version)
            gc.collect()
            left, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            print(f"{version}: {peak >> 10} KiB at the highest, {left >> 10} KiB left")
            assert peak < 64 << 20
            grown.append(left)
        fleet.check()
        assert all(worker.version == "b" for worker in workers)
        assert grown[-1] < 4 << 20  # what one more update leaves behind: its record


def kept_waiting() -> float:
    """Seconds for which this thread could have run while others had the cores."""
    counters = Path("/proc/thread-self/schedstat")
    return int(counters.read_text().split()[1]) / 1e9 if counters.exists() else 0.0


async def test_an_update_of_a_thousand_workers_takes_at_most_twice_the_slowest(
    tmp_path: Path,
) -> None:
    rng = random.Random(3)
    spent: Counter[str] = Counter()

    def latency(worker: SimulatedWorker) -> float:
        seconds = rng.uniform(0.1, 0.5)
        spent[worker.name] += seconds  # type: ignore[assignment]
        return seconds

    async with many(tmp_path) as (fleet, workers):
        for worker in workers:
            worker.latency = partial(latency, worker)
        begun = perf_counter() - kept_waiting()
        await fleet.update("a")
        seconds, slowest = perf_counter() - kept_waiting() - begun, max(spent.values())
        print(f"{seconds:.2f} s, the slowest worker {slowest:.2f} s")
        assert seconds <= 2 * slowest
        assert {worker.version for worker in workers} == {"a"}
