"""Crashes of trainer, worker and gateway during a run: it ends with the same weights."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.chain.records import Chain
from lockstep.train import StepMetrics, TrainConfig
from tests.processes import TOKEN
from tests.train.conftest import Stack, run_config

STEPS = 5
TRAIN = "import typer; from lockstep.cli.training.train import train; typer.run(train)"


def config(run_dir: Path) -> TrainConfig:
    return run_config(run_dir, loop={"steps": STEPS, "keep_checkpoints": 2})


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step-{STEPS}" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    asyncio.run(stack.trainer(config(run_dir)).run())
    return final_weights(run_dir)


def toml(run_dir: Path, stack: Stack) -> Path:
    made = config(run_dir)
    path = run_dir.parent / "run.toml"
    path.write_text(
        f'run_dir = "{run_dir}"\nseed = 1\n'
        f'[serve]\nurl = "{stack.process.url}"\nadmin_url = "{stack.process.admin_url}"\n'
        f"[rollout]\ngroups = {made.rollout.groups}\ngroup_size = {made.rollout.group_size}\n"
        f"max_tokens = {made.rollout.max_tokens}\n"
        f"[loop]\nsteps = {STEPS}\nkeep_checkpoints = 2\n[eval]\nprompts = 0\n"
    )
    return path


async def test_a_killed_trainer_resumes_to_the_same_weights(
    stack: Stack, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", TRAIN, str(toml(run_dir, stack)), "--json"]
    environ = {**os.environ, "LOCKSTEP_ADMIN_TOKEN": TOKEN}
    process = subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None
    rng = random.Random()
    for _ in range(rng.randint(1, STEPS - 2)):
        assert process.stdout.readline().startswith('{"step"')
    await asyncio.sleep(rng.uniform(0, 0.5))
    process.kill()
    process.wait()
    seen: list[StepMetrics] = []
    await stack.trainer(config(run_dir), resume=True).run(seen.append)
    assert same(final_weights(run_dir), undisturbed)
    written = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [StepMetrics.from_json(json.loads(line)).step for line in written]
    assert steps == list(range(1, STEPS + 1))
    chain = Chain.read(run_dir)
    assert chain.breaks == ()
    assert list(chain.steps) == steps
    assert "resume" in [link.kind for link in chain.links]


async def test_a_run_survives_the_death_of_its_worker_and_its_gateway(
    stack: Stack, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    restarted: list[asyncio.Task[None]] = []

    def disturb(step: StepMetrics) -> None:
        if step.step == 1:
            stack.kill_worker(random.randrange(2))
        if step.step == 3:
            stack.kill_gateway()
            restarted.append(asyncio.create_task(asyncio.to_thread(stack.start)))

    result = await stack.trainer(config(run_dir)).run(disturb)
    await asyncio.gather(*restarted)
    assert [step.step for step in result.steps] == list(range(1, STEPS + 1))
    assert all(step.mismatch_kl == 0.0 for step in result.steps)
    assert same(final_weights(run_dir), undisturbed)
