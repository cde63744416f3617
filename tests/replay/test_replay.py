"""Recorded runs are repeated with all digests equal, and what differs is found."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lockstep.chain.records import Chain
from lockstep.replay import replay
from lockstep.tokens.errors import BadRequest
from tests.replay.conftest import STEPS, altered, record_run


@pytest.mark.exact_arithmetic
async def test_an_async_run_with_a_killed_worker_replays_with_fresh_rollouts(
    recorded: Path,
) -> None:
    outcome = await replay(recorded, fresh_rollouts=True)
    assert outcome.differences == []
    assert outcome.held
    assert outcome.mode == "bits"
    assert outcome.steps == list(range(1, STEPS + 1))
    assert outcome.draws >= outcome.rewards == STEPS * 16
    sampled = [step["samples"]["tokens_by_version"] for step in Chain.read(recorded).steps.values()]
    assert outcome.tokens == sum(own["tokens"] for step in sampled for own in step.values())
    assert outcome.from_record == {}


@pytest.mark.exact_arithmetic
async def test_an_async_run_that_was_killed_and_resumed_replays_as_it_ran(tmp_path: Path) -> None:
    """Its schedule is another than without the kill: the record says which groups it learnt from,
    and under which weights they were sampled."""
    run = tmp_path / "run"
    await asyncio.to_thread(record_run, run, "tiny", kill_trainer_after=3, loop={"steps": 6})
    chain = Chain.read(run)
    assert chain.breaks == ()
    assert "resume" in [link.kind for link in chain.links]
    assert list(chain.steps) == [1, 2, 3, 4, 5, 6]
    outcome = await replay(run, fresh_rollouts=True)
    assert outcome.differences == []
    assert outcome.held
    assert outcome.from_record == {}


@pytest.mark.exact_arithmetic
async def test_adapters_on_experts_replay_with_their_routes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    await asyncio.to_thread(
        record_run, run, "tiny-moe", rollout={"experts": True, "groups": 2},
        learner={"lora_rank": 4}, loop={"steps": 3},
    )  # fmt: skip
    outcome = await replay(run, fresh_rollouts=True)
    assert outcome.differences == []
    assert outcome.held
    assert Chain.read(run).steps[2]["samples"]["routes"] is not None

    def other_route(record: dict[str, Any], contents: dict[str, Any]) -> None:
        if record["step"] == 2 and contents:
            experts = contents["groups"][0]["rollouts"][0]["samples"][0]["experts"]
            experts["data"] = experts["data"][:-4] + "AAAA"

    broken = await replay(altered(run, tmp_path / "broken", other_route), fresh_rollouts=True)
    assert {(own.step, own.what) for own in broken.differences} >= {(2, "routes")}


@pytest.mark.exact_arithmetic
async def test_later_steps_start_from_a_kept_checkpoint(recorded: Path) -> None:
    repeated: list[int] = []
    outcome = await replay(recorded, first=STEPS, on_step=repeated.append)
    assert outcome.held
    assert outcome.steps == repeated == [STEPS]


async def test_an_altered_reward_is_found_by_the_environment(
    recorded: Path, tmp_path: Path
) -> None:
    def raise_reward(record: dict[str, Any], contents: dict[str, Any]) -> None:
        if record["step"] == 2 and contents:
            contents["groups"][1]["rollouts"][3]["reward"]["value"] = 7.0

    outcome = await replay(altered(recorded, tmp_path / "run", raise_reward), last=2)
    first = outcome.differences[0]
    assert (first.step, first.what) == (2, "reward")
    assert "group 1" in first.where
    assert "rollout 3" in first.where
    # What was learnt from the other reward differs as well.
    assert {"batch", "weights"} <= {own.what for own in outcome.differences}


@pytest.mark.exact_arithmetic
async def test_an_altered_token_is_found_by_sampling_again(recorded: Path, tmp_path: Path) -> None:
    def swap_token(record: dict[str, Any], contents: dict[str, Any]) -> None:
        if record["step"] == 1 and contents:
            sample = contents["groups"][2]["rollouts"][1]["samples"][0]
            at = sample["sampled_mask"].index(True)
            sample["token_ids"][at] = (sample["token_ids"][at] + 1) % 500

    run = altered(recorded, tmp_path / "run", swap_token)
    outcome = await replay(run, last=1, fresh_rollouts=True)
    found = [own for own in outcome.differences if own.what == "token"]
    assert [own.where.split(", token")[0] for own in found] == ["group 2, rollout 1"]


@pytest.mark.failure_mode("F77")
async def test_inputs_that_are_not_deterministic_are_listed(recorded: Path, tmp_path: Path) -> None:
    def other_environment(record: dict[str, Any], _: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["config"]["env"]["name"] = "tests.replay.clock:Clock"

    run = altered(recorded, tmp_path / "run", other_environment)
    outcome = await replay(run, last=1)
    assert outcome.rewards == 0
    (listed,) = outcome.from_record
    assert "rewards of the environment 'tests.replay.clock:Clock'" in listed
    assert outcome.from_record[listed] == 16
    assert any(listed in line for line in outcome.lines())


async def test_another_fingerprint_is_compared_within_the_band(
    recorded: Path, tmp_path: Path
) -> None:
    def other_machine(record: dict[str, Any], _: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["arithmetic"]["trainer"]["fingerprint"] = "0" * 16
            record["arithmetic"]["workers"]["fingerprint"] = "0" * 16

    run = altered(recorded, tmp_path / "run", other_machine)
    outcome = await replay(run, last=2, fresh_rollouts=True)
    assert outcome.mode == "band"
    assert "fingerprint" in outcome.reason
    assert outcome.held
    (listed,) = outcome.from_record
    assert listed.startswith("tokens sampled in other arithmetic")

    def other_loss(record: dict[str, Any], contents: dict[str, Any]) -> None:
        other_machine(record, contents)
        if record["step"] == 2:
            record["learning"]["metrics"]["loss"] += 0.1

    worse = await replay(altered(recorded, tmp_path / "worse", other_loss), last=2)
    assert [(own.step, own.what) for own in worse.differences] == [(2, "loss")]


async def test_steps_that_were_not_recorded_are_refused(recorded: Path) -> None:
    with pytest.raises(BadRequest, match=rf"steps 3\.\.99 are not recorded: .* 1 to {STEPS}"):
        await replay(recorded, first=3, last=99)
