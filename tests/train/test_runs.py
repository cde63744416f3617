"""Whole runs over real HTTP: the reward rises, and trainer and engines agree bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.fleet.remote import RemoteFleet
from lockstep.tokens.errors import Conflict
from lockstep.train import StepMetrics, TrainConfig, Trainer
from lockstep.train.learning.learner import Learner
from tests.processes import TOKEN, ServeProcess, WorkerProcess
from tests.train.conftest import Stack, run_config
from tests.train.rollouts import directory


def lines(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


async def test_the_reward_rises_without_any_mismatch(stack: Stack, tmp_path: Path) -> None:
    seen: list[StepMetrics] = []
    config = run_config(
        tmp_path / "run",
        rollout={"groups": 8, "group_size": 8},
        learner={"lr": 3e-4},
        loop={"steps": 6},
        eval={"prompts": 32},
    )
    result = await stack.trainer(config).run(seen.append)
    assert result.before is not None
    assert result.after is not None
    assert result.after.reward > result.before.reward + 0.15
    assert [step.step for step in seen] == list(range(1, 7))
    for step in seen:
        assert step.mismatch_kl == 0.0
        assert step.is_masked == 0.0
        assert (step.breaks, step.aborts, step.dropped, step.off_policy_max) == (0, 0, 0, 0)
        assert step.version.startswith(f"step-{step.step}")
        assert [worker["version"] for worker in step.workers] == [step.version] * 2

    run = tmp_path / "run"
    assert [line["step"] for line in lines(run, "metrics.jsonl")] == list(range(1, 7))
    needed = {"reward", "reward_std", "solved", "tokens", "tokens_per_second", "entropy", "loss",
              "grad_norm", "lr", "off_policy", "pause_seconds", "time/rollout", "time/train",
              "time/update", "time/step", "workers"}  # fmt: skip
    assert needed <= set(lines(run, "metrics.jsonl")[0])
    assert StepMetrics.from_json(lines(run, "metrics.jsonl")[2]) == seen[2]
    kinds = [line["kind"] for line in lines(run, "events.jsonl")]
    assert kinds.count("update") == 7
    assert kinds.count("eval") == 2
    assert "mismatch" not in kinds
    shown = lines(run, "samples.jsonl")[0]
    size = len(shown["token_ids"])
    for key in (
        "token_strings",
        "sampled_mask",
        "logprobs",
        "trainer_logprobs",
        "versions",
        "roles",
    ):
        assert len(shown[key]) == size
    assert {"user", "assistant", "template"} == set(shown["roles"])
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step-4", "step-5", "step-6"]
    assert json.loads((run / "run.json").read_text())["after"]["reward"] == result.after.reward

    with pytest.raises(Conflict, match="already holds a run: resume it"):
        await stack.trainer(config).run()


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_dapo_replaces_groups_whose_rewards_are_all_equal(
    stack: Stack, tmp_path: Path, mode: str
) -> None:
    """A resumed run plays the tasks that an uninterrupted one would have played next."""
    sections: dict[str, Any] = {
        "loss": {"kind": "dapo", "overlong": 8},
        "rollout": {"groups": 4, "group_size": 2, "max_tokens": 16},
        "loop": {"mode": mode, "steps": 2, "max_off_policy": 1},
    }
    run = tmp_path / "run"
    await stack.trainer(run_config(run, **sections)).run()
    sections["loop"]["steps"] = 3
    result = await stack.trainer(run_config(run, **sections), resume=True).run()
    learnt = lines(run, "metrics.jsonl")
    assert len(learnt) == 3
    assert any(line.get("uniform", 0) > 0 for line in learnt)
    assert all(line["mismatch_kl"] == 0.0 for line in learnt if not line["off_policy_max"])
    played = torch.load(run / "state" / "step-3.pt", weights_only=True)["played"]
    assert played >= sum(4 + line.get("uniform", 0) for line in learnt) > 12
    assert result.steps[-1].step == 3


async def test_two_turns_with_a_tool_stay_exact(stack: Stack, tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", env={"name": "calc"}, loop={"steps": 2})
    result = await stack.trainer(config).run()
    assert all(step.mismatch_kl == 0.0 and step.breaks == 0 for step in result.steps)
    roles = {role for line in lines(tmp_path / "run", "samples.jsonl") for role in line["roles"]}
    assert "tool" in roles


async def test_experts_and_truncation_need_no_further_options(tmp_path: Path) -> None:
    """A mixture of experts with the default of rollout.experts, drawn with top_p and min_p."""
    config = run_config(
        tmp_path / "run",
        model="tiny-moe",
        rollout={"groups": 2, "max_tokens": 16, "top_p": 0.9, "min_p": 0.01},
        loop={"steps": 2},
    )
    serve = ServeProcess("--sessions", "memory", "--state-dir", str(tmp_path / "state"),
                         "--worker-args", "--max-model-len 256", model="tiny-moe")  # fmt: skip
    try:
        await Trainer(config, serve.url, serve.admin_url, TOKEN).run()
    finally:
        serve.stop()
    for line in lines(tmp_path / "run", "metrics.jsonl"):
        assert line["compared_logprobs"] > 0
        assert line["unequal_logprobs"] == 0
    drawn = lines(tmp_path / "run", "samples.jsonl")[0]
    assert drawn["support"]["vocab"] == 512


async def push(stack: Stack, config: TrainConfig, where: Path) -> None:
    """Make the fleet serve the weights that a run starts from."""
    Learner(config, exact=True).save(where, where.name)
    async with RemoteFleet(stack.process.admin_url, token=TOKEN) as fleet:
        await fleet.update_weights(where, where.name)


async def test_lora_trains_an_adapter_that_the_fleet_serves(stack: Stack, tmp_path: Path) -> None:
    config = run_config(
        tmp_path / "run",
        rollout={"groups": 6, "group_size": 6},
        learner={"lora_rank": 8, "lr": 4e-3},
        loop={"steps": 4},
        eval={"prompts": 32},
    )
    noisy = run_config(tmp_path, model=str(student(tmp_path / "student")))
    await push(stack, noisy, tmp_path / "other")
    with pytest.raises(Conflict, match=r"serves version 'other.*an adapter trained on one"):
        await stack.trainer(run_config(tmp_path / "wrong", learner={"lora_rank": 8})).run()
    await push(stack, run_config(tmp_path), tmp_path / "base")
    result = await stack.trainer(config).run()
    assert all(step.mismatch_kl == 0.0 for step in result.steps)
    assert result.before is not None
    assert result.after is not None
    assert result.after.reward > result.before.reward
    versions = {
        v for line in lines(tmp_path / "run", "samples.jsonl") for v in line["versions"] if v
    }
    assert all("+policy@step-" in version for version in versions)
    async with RemoteFleet(stack.process.admin_url, token=TOKEN) as fleet:
        await fleet.unload_adapter("policy")


async def test_async_rollouts_run_while_the_trainer_steps(stack: Stack, tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", loop={"mode": "async", "max_off_policy": 1, "steps": 4})
    result = await stack.trainer(config).run()
    assert len(result.steps) == 4
    assert result.steps[0].mismatch_kl == 0.0
    assert max(step.off_policy_max for step in result.steps) == 1
    assert all(step.mismatch_kl > 0 for step in result.steps if step.off_policy > 0)


@pytest.fixture(scope="module")
def teacher() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", "256")
    yield process
    process.stop()


def student(target: Path) -> Path:
    """The bundled model with noise on every matrix."""
    shutil.copytree(directory("tiny"), target)
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor + 0.15 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1
        else tensor
        for name, tensor in tensors.items()
    }
    save_file(noisy, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("kind", ["distill", "reverse_kl"])
async def test_distillation_brings_the_student_closer_to_its_teacher(
    stack: Stack, teacher: WorkerProcess, tmp_path: Path, kind: str
) -> None:
    """By the teacher's logprobs of sampled tokens, and by its 8 likeliest tokens beside them."""
    config = run_config(
        tmp_path / "run",
        model=str(student(tmp_path / "student")),
        loss={"kind": kind},
        teacher={"url": teacher.url, "top_k": 8},
        rollout={"groups": 32, "group_size": 2},
        loop={"steps": 4},
        seed=3,
    )
    result = await stack.trainer(config).run()
    distance = [step.more["ref_kl"] for step in result.steps]
    assert all(step.mismatch_kl == 0.0 for step in result.steps)
    assert sum(distance[-2:]) < 0.6 * sum(distance[:2])
