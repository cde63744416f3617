"""A step of a trainer on three tasks (benchmarks/trainer_tasks.py): TRL's GRPOTrainer on a gateway,
Lockstep's own loop in both modes, and Tinker's SDK on `lockstep tinker`, beside TRL alone.

    python -m benchmarks.trainers [short] [long] [calc]        (short unless given)

128 rollouts a step (16 x 8), the bundled model, two cores. TRL alone generates in its own process
with transformers; on the gateway every step writes, stages, proves and swaps the weights of a
worker process. Runs take turns, and the first steps of each are not counted. CPU seconds are those
of all processes. The short task is run in one and in two threads, and the faster of the two counts
on each side. Figures are medians of the steps, for the long task means.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import peers, table
from benchmarks.table import Row
from benchmarks.trainer_tasks import TASKS

SHORT_ROUNDS = 2
DEFAULT = ("short",)
"""The tasks measured unless others are named: long and calc take 10 minutes more."""
TOKEN = "benchmark"
TRL, OWN, TINKER = "benchmarks.trl_run", "benchmarks.own_run", "benchmarks.tinker_run"
Measured = dict[str, Any]


def rows(tasks: Sequence[str]) -> list[Row]:
    return [row for task in tasks for row in BY_TASK[task]()]


def short() -> list[Row]:
    runs: dict[str, list[Measured]] = defaultdict(list)
    for _ in range(SHORT_ROUNDS):
        runs["alone"].append(run(TRL, "short"))
        runs["one thread"].append(run(TRL, "short", threads=1))
        runs["on Lockstep"].append(on_gateway(TRL, "short"))
        runs["on Lockstep, one thread"].append(on_gateway(TRL, "short", threads=1))
        runs["in turns"].append(on_gateway(OWN, "short", "--mode", "sync"))
        runs["in turns, two threads"].append(
            on_gateway(OWN, "short", "--mode", "sync", "--threads", "2")
        )
        runs["ahead"].append(on_gateway(OWN, "short", "--mode", "async"))
        runs["Tinker"].append(on_tinker())
    alone = faster(runs["alone"], runs["one thread"])
    on = faster(runs["on Lockstep"], runs["on Lockstep, one thread"])
    in_turns = faster(runs["in turns"], runs["in turns, two threads"])
    ahead = runs["ahead"]
    frugal = runs["one thread"]
    one = "TRL alone, one thread"
    return [
        compared("short", "TRL on Lockstep, a step", on, alone),
        compared("short", "own loop, in turns, a step", in_turns, alone, at_most=0.85),
        compared("short", "own loop, one version ahead, a step", ahead, alone, at_most=0.62),
        compared("short", "Tinker's SDK on Lockstep, a step", runs["Tinker"], alone),
        used(
            "short",
            "TRL on Lockstep, one thread, CPU of a step",
            runs["on Lockstep, one thread"],
            frugal,
            one,
        ),
        used("short", "own loop, in turns, CPU of a step", runs["in turns"], frugal, one),
        used("short", "own loop, one version ahead, CPU of a step", ahead, frugal, one),
        used("short", "Tinker's SDK on Lockstep, CPU of a step", runs["Tinker"], frugal, one),
    ]


def faster(one: list[Measured], other: list[Measured]) -> list[Measured]:
    return min((one, other), key=lambda runs: figure("short", runs, wall))


def uneven(task: str) -> list[Row]:
    """Rows of a task on which TRL alone waits for its longest answer."""
    alone = [run(TRL, task)]
    on = [on_gateway(TRL, task)]
    in_turns = [on_gateway(OWN, task, "--mode", "sync")]
    ahead = [on_gateway(OWN, task, "--mode", "async")]
    return [
        compared(task, "TRL on Lockstep, a step", on, alone),
        compared(task, "own loop, in turns, a step", in_turns, alone),
        compared(task, "own loop, one version ahead, a step", ahead, alone),
        used(task, "TRL on Lockstep, CPU of a step", on, alone),
        used(task, "own loop, in turns, CPU of a step", in_turns, alone),
    ]


BY_TASK: dict[str, Callable[[], list[Row]]] = {
    "short": short,
    "long": partial(uneven, "long"),
    "calc": partial(uneven, "calc"),
}

# Rows


def wall(step: tuple[float, float, float]) -> float:
    return step[0]


def cpu(step: tuple[float, float, float]) -> float:
    return step[1] + step[2]


def figure(task: str, runs: list[Measured], value: Any) -> float:
    """Of the steps of these runs that are measured: the median, of uneven ones the mean."""
    columns = ("wall", "cpu", "served_cpu")
    steps = [
        value(step)
        for each in runs
        for step in list(zip(*(each[name] for name in columns), strict=True))[TASKS[task].warm :]
    ]
    return float(mean(steps) if task == "long" else median(steps))


def compared(
    task: str, what: str, ours: list[Measured], alone: list[Measured], at_most: float | None = None
) -> Row:
    after, before = (median(mean(each["reward"][-3:]) for each in runs) for runs in (ours, alone))
    worst = max(each["mismatch"] for each in ours)
    remark = f"reward {after:.2f}, alone {before:.2f}; logprobs off by {worst:.1e}"
    if task == "long":
        lengths = (median(mean(each["tokens"]) for each in runs) for runs in (ours, alone))
        remark += "; tokens an answer {:.0f}, alone {:.0f}".format(*lengths)
        if dropped := sum(sum(each.get("dropped", ())) for each in ours):
            remark += f"; {dropped} answers were too old to learn from"
    return Row(
        what=f"{task}: {what}", against="TRL alone", ours=figure(task, ours, wall),
        theirs=figure(task, alone, wall), unit="s", at_most=at_most, note=remark,
        headline=f"training, {task} task: {what}" if at_most else "",
    )  # fmt: skip


def used(
    task: str, what: str, ours: list[Measured], alone: list[Measured], against: str = "TRL alone"
) -> Row:
    return Row(
        what=f"{task}: {what}", against=against, ours=figure(task, ours, cpu),
        theirs=figure(task, alone, cpu), unit="s",
    )  # fmt: skip


# Runs


def run(
    module: str, task: str, *arguments: str, threads: int | None = None, **environ: str
) -> Measured:
    """What a run of one of the programs measured. Raises RuntimeError where it fails."""
    python = sys.executable
    if module != OWN:
        python = str(peers.python("trl" if module == TRL else "tinker"))
    command = [python, "-m", module, *(() if module == TINKER else ("--task", task))]
    environ = {**os.environ, "PYTHONPATH": str(peers.ROOT), "TRL_EXPERIMENTAL_SILENCE": "1",
               "HF_HUB_OFFLINE": "1", **environ}  # fmt: skip
    if threads is not None:
        environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    ended = subprocess.run(
        [*command, *arguments], env=environ, cwd=peers.ROOT, capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError(f"{command} failed: {ended.stderr[-4000:]}")
    measured: Measured = json.loads(ended.stdout.strip().splitlines()[-1])
    return measured


def on_gateway(module: str, task: str, *arguments: str, threads: int | None = None) -> Measured:
    # A place for each rollout of a step: with fewer, the last ones wait for the first.
    at_once = ("--worker-args", "--max-num-seqs 128")
    with served("serve", "--admin-port", "0", "--sessions", "memory", *at_once) as (pid, ready):
        where = ["--url", ready["url"], "--admin-url", ready["admin_url"], "--token", TOKEN]
        return run(module, task, *where, "--served-pid", str(pid), *arguments, threads=threads)


def on_tinker() -> Measured:
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as state,
        served("tinker", "--admin-port", "0", "--state-dir", state) as (pid, ready),
    ):
        own = {"TINKER_BASE_URL": ready["url"], "TINKER_API_KEY": "tml-benchmark", "HOME": state}
        return run(TINKER, "short", "--served-pid", str(pid), **own)


@contextmanager
def served(kind: str, *arguments: str) -> Iterator[tuple[int, Measured]]:
    """A server of the bundled model: its process id, and what it says of itself when ready."""
    command = [sys.executable, "-m", "lockstep", kind, "tiny", "--json", "--port", "0", *arguments]
    environ = {**os.environ, "LOCKSTEP_ADMIN_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise RuntimeError(f"{command} ended with code {process.wait()}")
            yield process.pid, json.loads(line)
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="task", help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if unknown := set(options.tasks) - set(TASKS):
        parser.error(f"not known: {', '.join(sorted(unknown))}; expected {', '.join(TASKS)}")
    made = rows(options.tasks or DEFAULT)
    print(table.plain(made))
    if options.json:
        table.write(made, options.json)


if __name__ == "__main__":
    main()
