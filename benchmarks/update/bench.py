"""Weight updates: how long a fleet cannot generate, and how an update spreads over many workers.

    python -m benchmarks.update.bench

Two `lockstep worker` processes stream completions while they are given new weights of about
100 MB and 1 GB (random Qwen3, fp32), there and back, in two ways in turn, over real HTTP:

- Lockstep's transaction: stage beside the live weights, prove, quiesce, commit, resume;
- the order of prime-rl's client: pause all (keep), have all read the checkpoint, resume all. The
  same engine does it, by its own route for that. Nothing is proved in it.

Both read the same files, which are in the page cache. "Cannot generate" is the time from the moment
the first worker has stopped (its response to the pause) to the moment the last one goes on (its
response to the resume). The other rows are what a client sees: the longest time that a worker sent
no token. That includes the running step and the new prefill of the requests in flight, which is the
same work in both ways.

The second half updates 10 to 1,000 simulated workers in one fleet: see `fan_out`.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import aiohttp
import torch

from benchmarks import table
from benchmarks.table import Row
from benchmarks.update import fan_out
from benchmarks.update.checkpoints import Size
from benchmarks.update.workers import Worker, load, reload, transaction, workers

SIZES = {
    Size("100 MB", vocab=16384, hidden=512, layers=4): 4,
    Size("1 GB", vocab=98304, hidden=1024, layers=4): 2,
}
"""Sizes, and the rounds of each: in one, both ways take their turn."""
WARM_UP = 1
PEER = "prime-rl's order: pause, reload, resume"


@dataclass(frozen=True, slots=True)
class Update:
    """Seconds of one: no worker could generate, and the longest silence of one of them."""

    stopped: float
    silent: float


def rows() -> list[Row]:
    torch.set_num_threads(1)
    measured = []
    for size, rounds in SIZES.items():
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
            measured += of_size(size, rounds, Path(directory))
    return measured + fan_out.rows()


def of_size(size: Size, rounds: int, directory: Path) -> list[Row]:
    pair = [size.checkpoint(directory / name, seed) for seed, name in enumerate("ab")]
    with workers(pair[0]) as fleet:
        ours, theirs = asyncio.run(measure(fleet, pair, rounds))
    return [
        Row(
            what=f"update of {size.name}: time in which the fleet cannot generate",
            against=PEER,
            ours=1e3 * median(one.stopped for one in ours),
            theirs=1e3 * median(one.stopped for one in theirs),
            unit="ms",
            note="ours has proved the weights before",
            headline=f"update of {size.name}: time in which the fleet cannot generate"
            if size.name == "1 GB"
            else "",
        ),
        Row(
            what=f"update of {size.name}: longest silence of a stream",
            against=PEER,
            ours=1e3 * median(one.silent for one in ours),
            theirs=1e3 * median(one.silent for one in theirs),
            unit="ms",
            note="includes the new prefill of requests in flight",
        ),
    ]


async def measure(
    fleet: list[Worker], pair: list[Path], rounds: int
) -> tuple[list[Update], list[Update]]:
    """Updates by the transaction and by reloading, in turn; every one changes all weights."""
    ours: list[Update] = []
    theirs: list[Update] = []
    numbers = count(1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
        for turn in range(WARM_UP + rounds):
            for updates in (ours, theirs):
                number = next(numbers)
                checkpoint, version = pair[number % 2], f"v{number}"
                async with load(session, fleet) as running:
                    if updates is ours:
                        stopped = await transaction(fleet, checkpoint, version)
                    else:
                        stopped = await reload(session, fleet, checkpoint, version)
                if turn >= WARM_UP:
                    updates.append(Update(stopped, running.gap()))
    return ours, theirs


if __name__ == "__main__":
    table.main(rows, __doc__)
