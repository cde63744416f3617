"""A step of TRL's GRPOTrainer: on a Lockstep gateway beside TRL alone, on the short reverse task.

    python -m benchmarks.trainers

128 rollouts a step (16 x 8) of about 9 tokens, the bundled model, two cores. TRL alone generates in
its own process with transformers; on the gateway every step writes, stages, proves and swaps the
weights of a worker process. Runs take turns, and the first steps of each are left out.
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


def rows() -> list[Row]:
    alone: list[dict[str, Any]] = []
    close: list[dict[str, Any]] = []
    exact: list[dict[str, Any]] = []
    for _ in range(ROUNDS):
        alone.append(run())
        close.append(on_gateway())
        exact.append(on_gateway("--exact"))
    theirs = seconds(alone)
    return [
        Row(
            what="TRL on Lockstep, a step", against="TRL alone", ours=seconds(close),
            theirs=theirs, unit="s", at_most=1.3, note=told(close, alone),
        ),
        Row(
            what="TRL on Lockstep, exact, a step", against="TRL alone", ours=seconds(exact),
            theirs=theirs, unit="s", note=told(exact, alone),
        ),
    ]  # fmt: skip


def run(*arguments: str) -> dict[str, Any]:
    """What a run of benchmarks/trl_run.py measured."""
    command = [str(peers.python("trl")), "-m", "benchmarks.trl_run", "--steps", str(STEPS)]
    environ = {**os.environ, "PYTHONPATH": str(peers.ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [*command, *arguments], env=environ, cwd=peers.ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command} failed: {done.stderr[-4000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def on_gateway(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "lockstep", "serve", "tiny", "--json", "--port", "0",
               "--admin-port", "0", "--sessions", "memory"]  # fmt: skip
    environ = {**os.environ, "LOCKSTEP_ADMIN_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as served:
        try:
            line = served.stdout.readline() if served.stdout else ""
            ready = json.loads(line)
            where = ["--url", ready["url"], "--admin-url", ready["admin_url"], "--token", TOKEN]
            return run(*where, *arguments)
        finally:
            served.terminate()


def seconds(runs: list[dict[str, Any]]) -> float:
    return float(median(step for each in runs for step in each["wall"][WARM:]))


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
