"""A step of a trainer on the short reverse task: TRL's GRPOTrainer on a Lockstep gateway, and
Lockstep's own loop in both modes, beside TRL alone.

    python -m benchmarks.trainers

128 rollouts a step (16 x 8) of about 9 tokens, the bundled model, two cores. TRL alone generates in
its own process with transformers; on the gateway every step writes, stages, proves and swaps the
weights of a worker process. Runs take turns, and the first steps of each are left out.
CPU seconds are those of all processes; TRL alone is given one thread for them, as threads that wait
for each other on a busy machine burn time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from statistics import median
from typing import Any

from benchmarks import peers, table
from benchmarks.table import Row

ROUNDS, STEPS, WARM = 2, 12, 3
TOKEN = "benchmark"
TRL, OWN = "benchmarks.trl_run", "benchmarks.own_run"


def rows() -> list[Row]:
    alone: list[dict[str, Any]] = []
    close: list[dict[str, Any]] = []
    exact: list[dict[str, Any]] = []
    single: list[dict[str, Any]] = []
    in_turns: list[dict[str, Any]] = []
    ahead: list[dict[str, Any]] = []
    for _ in range(ROUNDS):
        alone.append(run())
        close.append(on_gateway("--close"))
        exact.append(on_gateway())
        single.append(run(threads=1))
        in_turns.append(on_gateway("--mode", "sync", module=OWN))
        ahead.append(on_gateway("--mode", "async", module=OWN))
    theirs = seconds(alone)
    # One thread is the faster way on a busy machine: TRL gets the better of its two.
    best = min(theirs, seconds(single))
    spent = median(step for each in single for step in each["cpu"][WARM:])
    return [
        Row(
            what="TRL on Lockstep, a step", against="TRL alone", ours=seconds(close),
            theirs=theirs, unit="s", at_most=1.3, note=told(close, alone),
        ),
        Row(
            what="TRL on Lockstep, exact, a step", against="TRL alone", ours=seconds(exact),
            theirs=theirs, unit="s", note=told(exact, alone),
        ),
        Row(
            what="own loop, in turns, a step", against="TRL alone", ours=seconds(in_turns),
            theirs=best, unit="s", at_most=1.0, note=told(in_turns, single),
        ),
        Row(
            what="own loop, one version ahead, a step", against="TRL alone", ours=seconds(ahead),
            theirs=best, unit="s", at_most=0.7, note=told(ahead, single),
        ),
        Row(
            what="own loop, in turns, CPU of a step", against="TRL alone, one thread",
            ours=cpu_of_all(in_turns), theirs=spent, unit="s",
        ),
        Row(
            what="own loop, one version ahead, CPU of a step", against="TRL alone, one thread",
            ours=cpu_of_all(ahead), theirs=spent, unit="s",
        ),
    ]  # fmt: skip


def run(*arguments: str, module: str = TRL, threads: int | None = None) -> dict[str, Any]:
    """What a run of benchmarks/trl_run.py or own_run.py measured."""
    python = str(peers.python("trl")) if module == TRL else sys.executable
    command = [python, "-m", module, "--steps", str(STEPS)]
    environ = {**os.environ, "PYTHONPATH": str(peers.ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    if threads is not None:
        environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [*command, *arguments], env=environ, cwd=peers.ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stderr[-4000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def on_gateway(*arguments: str, module: str = TRL) -> dict[str, Any]:
    command = [sys.executable, "-m", "lockstep", "serve", "tiny", "--json", "--port", "0",
               "--admin-port", "0", "--sessions", "memory"]  # fmt: skip
    environ = {**os.environ, "LOCKSTEP_ADMIN_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as served:
        try:
            line = served.stdout.readline() if served.stdout else ""
            ready = json.loads(line)
            where = ["--url", ready["url"], "--admin-url", ready["admin_url"], "--token", TOKEN]
            if module == OWN:
                where += ["--served-pid", str(served.pid)]
            return run(*where, *arguments, module=module)
        finally:
            served.terminate()


def seconds(runs: list[dict[str, Any]]) -> float:
    return float(median(step for each in runs for step in each["wall"][WARM:]))


def cpu_of_all(runs: list[dict[str, Any]]) -> float:
    """CPU seconds of a step: of the trainer, the gateway and its worker."""
    spent: list[float] = []
    for each in runs:
        pairs = zip(each["cpu"][WARM:], each["served_cpu"][WARM:], strict=True)
        spent += [own + served for own, served in pairs]
    return median(spent)


def told(ours: list[dict[str, Any]], alone: list[dict[str, Any]]) -> str:
    """CPU of the trainer's process, reward at the end, and how far logprobs were off."""
    cpu = median(step for each in ours for step in each["cpu"][WARM:])
    own = median(step for each in alone for step in each["cpu"][WARM:])
    after = median(sum(each["reward"][-3:]) / 3 for each in ours)
    before = median(sum(each["reward"][-3:]) / 3 for each in alone)
    worst = max(each["mismatch"] for each in ours)
    return (
        f"trainer CPU {cpu:.2f} s, alone {own:.2f} s; reward {after:.2f}, alone {before:.2f}; "
        f"logprobs off by {worst:.1e}"
    )


if __name__ == "__main__":
    table.main(rows, __doc__)
