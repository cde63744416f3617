"""Two runs are compared, and the first value in which they differ is named with its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lockstep.chain.records import Chain
from lockstep.models import model_directory
from lockstep.replay import bisect
from tests.replay.conftest import STEPS, altered, command, record_run


def test_a_run_equals_itself(recorded: Path) -> None:
    outcome = bisect(recorded, recorded)
    assert outcome.same
    assert list(outcome.lines())[-1] == f"  All {STEPS} common steps are equal."


def test_an_altered_reward_is_found_at_its_rollout(recorded: Path, tmp_path: Path) -> None:
    def raise_reward(record: dict[str, Any], contents: dict[str, Any]) -> None:
        if record["step"] == 5 and contents:
            contents["groups"][1]["rollouts"][3]["reward"]["value"] = 7.0

    outcome = bisect(recorded, altered(recorded, tmp_path / "run", raise_reward))
    assert outcome.first is not None
    assert (outcome.step, outcome.first.what) == (5, "reward")
    assert outcome.first.where == "step 5, group 1, rollout 3"
    assert outcome.first.b == 7.0
    # The digest in the record was not altered with it.
    assert "the rewards in step-5.json.gz are not those of its record" in outcome.problems[0]


def test_a_swapped_sample_is_found_and_its_other_place_is_named(
    recorded: Path, tmp_path: Path
) -> None:
    places: list[int] = []

    def swap(record: dict[str, Any], contents: dict[str, Any]) -> None:
        if record["step"] == 3 and contents:
            rollouts = contents["groups"][2]["rollouts"]
            ids = [own["samples"][0]["token_ids"] for own in rollouts]
            first, second = next((i, j) for i in range(4) for j in range(i) if ids[i] != ids[j])
            places.extend(sorted((first, second)))
            for key in ("samples", "draws"):
                rollouts[first][key], rollouts[second][key] = (
                    rollouts[second][key], rollouts[first][key],
                )  # fmt: skip

    outcome = bisect(recorded, altered(recorded, tmp_path / "run", swap))
    assert outcome.step == 3
    assert outcome.first is not None
    # Seeds are drawn by the place of a rollout: they moved with the sample.
    assert outcome.first.what == "sampling options"
    assert outcome.first.where == f"step 3, group 2, rollout {places[0]}, turn 0"

    def swap_samples_only(record: dict[str, Any], contents: dict[str, Any]) -> None:
        swap(record, contents)
        if record["step"] == 3 and contents:
            rollouts = contents["groups"][2]["rollouts"]
            first, second = places[-2:]
            draws = rollouts[first]["draws"], rollouts[second]["draws"]
            rollouts[second]["draws"], rollouts[first]["draws"] = draws

    outcome = bisect(recorded, altered(recorded, tmp_path / "samples", swap_samples_only))
    assert outcome.first is not None
    assert "this sample is at group 2, rollout" in outcome.first.what
    assert outcome.first.where.startswith(f"step 3, group 2, rollout {places[0]}, token ")


def test_a_changed_line_of_the_configuration_is_found(recorded: Path, tmp_path: Path) -> None:
    def other_rate(record: dict[str, Any], _: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["config"]["learner"]["lr"] = 1e-4
            record["config"]["run_dir"] = "elsewhere"  # decides nothing

    outcome = bisect(recorded, altered(recorded, tmp_path / "run", other_rate))
    (line,) = outcome.conditions
    assert (line.where, line.what, line.a, line.b) == ("configuration", "learner.lr", 3e-4, 1e-4)
    assert outcome.first is None


def test_an_edited_checkpoint_is_found_at_its_element(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded, tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / f"step-{STEPS}" / "model.safetensors"
    name, before, after = edit(path)
    outcome = bisect(recorded, tmp_path / "run")
    assert f"the checkpoint of step {STEPS} was altered in {name}" in outcome.problems[0]
    (element,) = outcome.conditions
    assert element.where == f"checkpoint of step {STEPS}, {name}"
    assert element.what.startswith("element [1, 2] (1 of ")
    assert (element.a, element.b) == (before, after)


def test_runs_from_an_edited_model_differ_before_the_first_step(
    recorded: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_directory("tiny"), model)
    name, before, after = edit(model / "model.safetensors")
    record_run(tmp_path / "run", str(model), loop={"steps": 1})
    outcome = bisect(recorded, tmp_path / "run")
    file, element = outcome.conditions
    assert (file.where, file.what) == ("model file", "model.safetensors")
    assert element.where.startswith(f"before the first step, weights, {name} (1 of ")
    assert element.what.startswith("element [1, 2]")
    assert (element.a, element.b) == (before, after)
    assert outcome.problems == []


def test_the_weights_that_tokens_were_sampled_under_are_compared(
    recorded: Path, tmp_path: Path
) -> None:
    """The schedule of async mode: the same token ids, of weights of another step."""

    def other_schedule(record: dict[str, Any], contents: dict[str, Any]) -> None:
        if record["step"] == 4 and contents:
            for label in contents["clock"]:
                contents["clock"][label] -= 1

    outcome = bisect(recorded, altered(recorded, tmp_path / "run", other_schedule))
    assert outcome.step == 4
    assert outcome.first is not None
    assert outcome.first.what.startswith("step of the weights of its tokens")
    assert outcome.first.where == "step 4, group 0, rollout 0"


def test_the_command_prints_a_diff_and_a_page(recorded: Path, tmp_path: Path) -> None:
    def other_loss(record: dict[str, Any], _: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] == 2:
            record["learning"]["metrics"]["loss"] = 9.0

    run = altered(recorded, tmp_path / "run", other_loss)
    page = tmp_path / "page.html"
    done = command("bisect", str(recorded), str(run), "--report", str(page))
    assert done.returncode == 1
    loss = Chain.read(recorded).steps[2]["learning"]["metrics"]["loss"]
    assert f"@@ step 2: loss @@\n- {loss}\n+ 9.0" in done.stdout
    assert "step 2: loss" in page.read_text()
    same = command("bisect", str(recorded), str(recorded), "--json")
    assert same.returncode == 0
    assert json.loads(same.stdout)["same"] is True


def edit(path: Path) -> tuple[str, float, float]:
    """Change one element of a tensor; return its name, and the element before and after."""
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    before = float(tensors[name][1, 2])
    tensors[name][1, 2] += 0.01
    save_file(tensors, path, {"format": "pt"})
    assert torch.equal(load_file(path)[name], tensors[name])
    return name, before, float(tensors[name][1, 2])
