"""Recipes of tinker-cookbook, unmodified, against `lockstep tinker`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.models import bundled
from tests.trainers.tinker_server import TinkerProcess

pytestmark = pytest.mark.timeout(900)
STEPS = 6


def metrics(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_math_rl_learns_with_no_divergence_between_sampler_and_trainer(tmp_path: Path) -> None:
    server = TinkerProcess(tmp_path / "state")
    recipe = (
        "-m", "tinker_cookbook.recipes.math_rl.train", f"model_name={bundled('tiny')}",
        "renderer_name=qwen3_disable_thinking", "env=arithmetic", "group_size=8",
        "groups_per_batch=16", "learning_rate=1e-3", "max_tokens=6", "eval_every=0",
        "save_every=3", f"log_path={tmp_path / 'log'}",
    )  # fmt: skip
    says = "Training completed successfully"
    try:
        first = ("max_steps=4", "behavior_if_log_dir_exists=delete")
        server.run(tmp_path, *recipe, *first, says=says)
        # The recipe goes on from its last checkpoint by itself.
        second = (f"max_steps={STEPS}", "behavior_if_log_dir_exists=resume")
        server.run(tmp_path, *recipe, *second, says=says)
    finally:
        server.stop()
    steps = metrics(tmp_path / "log")
    assert len(steps) >= STEPS
    if server.ready["trainer"]["exact"]:
        for step in steps:
            assert step["optim/kl_sample_train_v1"] == 0.0
            assert step["optim/kl_sample_train_v2"] == 0.0
    # The model is too small to add, but it learns to end its answer, for which there is a reward.
    # A sum that it guesses by luck, whenever that is, counts ten times as much: no claim is made of
    # the total.
    assert steps[-1]["env/all/format"] > steps[0]["env/all/format"]
