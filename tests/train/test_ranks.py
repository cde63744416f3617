"""`lockstep train` on several ranks: the bits of one rank, also when ranks are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.chain.records import Chain
from lockstep.fleet.remote import RemoteFleet
from tests.processes import TOKEN
from tests.train.conftest import Stack, run_config

STEPS = 5
LIMIT = 240.0
RUN = """
run_dir = "{run_dir}"
seed = 1
[serve]
url = "{url}"
admin_url = "{admin_url}"
[rollout]
groups = 4
group_size = 4
max_tokens = 32
[learner]
pass_tokens = 24
[reference]
weight = 0.01
kind = "ema"
[loop]
steps = {steps}
keep_checkpoints = 2
[eval]
prompts = 0
"""
BIN = Path(sys.executable).parent


def start(stack: Stack, run_dir: Path, *command: str) -> subprocess.Popen[str]:
    served = {"url": stack.process.url, "admin_url": stack.process.admin_url}
    config = run_dir.with_suffix(".toml")
    config.write_text(RUN.format(run_dir=run_dir, steps=STEPS, **served))
    return subprocess.Popen(
        [*command, str(config)], text=True, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, env={**os.environ, "LOCKSTEP_ADMIN_TOKEN": TOKEN},
    )  # fmt: skip


def train(stack: Stack, run_dir: Path, ranks: int, *options: str) -> subprocess.Popen[str]:
    lockstep = str(BIN / "lockstep")
    return start(stack, run_dir, lockstep, "train", "--ranks", str(ranks), *options)


def rank_of(launcher: int, rank: int) -> int | None:
    """The process of a rank, once it runs."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if b"RANK=%d" % rank in environ:
            return int(child)
    return None


def kill_when(
    launcher: subprocess.Popen[str], rank: int, reached: Callable[[], bool]
) -> tuple[int, str]:
    """Kill a rank at a point of the run; the code and errors of the command."""
    deadline = time.monotonic() + LIMIT
    while not reached():
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.kill()
            raise AssertionError(f"it ended before it was killed: {launcher.communicate()[1]}")
        time.sleep(0.001)
    process = rank_of(launcher.pid, rank)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    return ended(launcher)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, errors


def phase(run: Path, name: str, step: int) -> Callable[[], bool]:
    """Whether a run that starts now is sampling, learning, writing or publishing a step."""
    if name == "sample":
        metrics = run / "metrics.jsonl"
        return lambda: metrics.exists() and metrics.read_text().count("\n") >= step - 1
    path = {
        "learn": run / "chain" / f"step-{step}.json.gz",
        "write": run / "checkpoints" / f"step-{step}" / ".writing",
        "publish": run / "checkpoints" / f"step-{step}" / "STABLE",
    }[name]
    left = path.stat().st_ino if path.exists() else None  # by a run that was killed before
    return lambda: path.exists() and path.stat().st_ino != left


def learnt(run: Path) -> dict[int, Any]:
    """What every step did: samples, passes, metrics, and the digest of every kind of tensor."""
    chain = Chain.read(run)
    assert chain.breaks == ()
    return {
        step: {
            "samples": record["samples"],
            "batch": record["batch"],
            **{name: record["learning"][name]
               for name in ("metrics", "gradients", "optimizer", "weights")},
        }
        for step, record in chain.steps.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The same run on one rank."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    config = run_config(
        run_dir,
        learner={"pass_tokens": 24},
        reference={"weight": 0.01, "kind": "ema"},
        loop={"steps": STEPS},
    )
    asyncio.run(stack.trainer(config).run())
    return learnt(run_dir)


async def served_steps(stack: Stack) -> set[int]:
    """The steps of the versions that the fleet and its workers serve."""
    async with RemoteFleet(stack.process.admin_url, token=TOKEN) as fleet:
        state = await fleet.state()
    serving = [worker["version"] for worker in state["workers"] if worker["state"] == "serving"]
    assert serving
    return {int(version.split("-")[1]) for version in (state["version"], *serving)}


KILLS = [
    (2, 1, "sample", 2),
    (2, 0, "learn", 2),
    (3, 2, "write", 2),
    (2, 0, "write", 3),
    (2, 1, "publish", 4),
    (2, 0, "publish", 5),
]
"""Number of ranks, the one that is killed, in which phase of which step."""


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F79")
@pytest.mark.failure_mode("F87")
async def test_ranks_killed_in_every_phase_end_with_the_weights_of_one_rank(
    stack: Stack, alone: dict[int, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for number, (ranks, rank, name, step) in enumerate(KILLS):
        resume = ["--resume"] if number > 0 else []
        reached = phase(run, name, step)
        code, errors = kill_when(train(stack, run, ranks, *resume), rank, reached)
        assert code == 75, errors
        assert f"rank {rank} of {ranks} was killed by SIGKILL" in errors
        old_or_new = {step - 1, step} if name == "publish" else {step - 1}
        assert await served_steps(stack) <= old_or_new
        assert f"--ranks {ranks} --resume` continues from the last checkpoint" in errors
    options = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    code, errors = ended(
        start(stack, run, sys.executable, *options, "lockstep", "train", "--resume")
    )
    assert code == 0, errors
    assert all(step["metrics"]["mismatch_max"] == 0.0 for step in alone.values())
    assert min(step["batch"]["passes"] for step in alone.values()) >= 3  # every rank has work
    assert learnt(run) == alone
