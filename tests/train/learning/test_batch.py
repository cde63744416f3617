"""Batches: which samples are learnt from, and that every dropped one is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.tokens import Sample, VersionSpan
from lockstep.tokens.errors import BadVersions, Conflict
from lockstep.train.config import LoopConfig, TrainConfig
from lockstep.train.learning.batch import Clock, is_stale, make_batch, version_lags
from tests.train.rollouts import batch, grouped


def sample(*versions: str, **changes: Any) -> Sample:
    """Two prompt tokens, then one token of each version."""
    count = len(versions)
    return Sample(
        token_ids=list(range(2 + count)),
        sampled_mask=[False] * 2 + [True] * count,
        logprobs=[0.0] * 2 + [-0.5] * count,
        versions=tuple(VersionSpan(v, 2 + at, 3 + at) for at, v in enumerate(versions)),
        **{"logprob_mode": "processed", **changes},
    )


def config(**loop: Any) -> TrainConfig:
    return TrainConfig(loop=LoopConfig(**loop))


def test_every_token_has_the_age_of_its_version() -> None:
    clock = Clock({"first": 0, "b": 1, "z": 4})
    assert version_lags(sample("first", "z", "b"), clock, 4).tolist() == [0, 0, 4, 0, 3]
    made = batch([sample("step-2", "step-3"), sample("step-3")], now=3, limit=1)
    assert made.off_policy == pytest.approx(1 / 3)
    assert made.off_policy_max == 1
    assert made.mixed == 1


def test_a_stale_version_label_is_dropped_and_counted() -> None:
    made = batch([sample("step-3"), sample("step-1"), sample("step-3", "step-0")], now=3, limit=1)
    assert (len(made.items), made.dropped) == (1, 2)
    kept = batch([sample("step-3"), sample("step-1")], now=3, limit=2)
    assert (len(kept.items), kept.dropped, kept.off_policy_max) == (2, 0, 2)


def test_a_version_that_the_run_never_published_is_an_error() -> None:
    with pytest.raises(BadVersions, match="'default', which this run has not published"):
        batch([sample("default")])


def test_a_group_is_stale_when_all_of_its_samples_are_too_old() -> None:
    clock = Clock({"step-0": 0, "step-2": 2})
    old, new = sample("step-0"), sample("step-2")
    assert is_stale(grouped([old, old])[0], clock, 2, 1)
    assert not is_stale(grouped([old, new])[0], clock, 2, 1)


@pytest.mark.parametrize(
    ("handling", "items", "learnt", "dropped"),
    [("drop", 1, 1, 1), ("mask", 2, 3, 0), ("keep", 2, 4, 0)],
)
def test_samples_of_mixed_versions(handling: str, items: int, learnt: int, dropped: int) -> None:
    mixed = sample("step-0", "step-1", "step-1")
    made = batch([mixed, sample("step-1")], config(mixed=handling), now=1, limit=5)
    assert (len(made.items), made.learnt_tokens, made.dropped) == (items, learnt, dropped)
    assert made.mixed == 1


@pytest.mark.parametrize(("handling", "items", "dropped"), [("drop", 1, 1), ("mask", 2, 0)])
def test_samples_with_an_abort(handling: str, items: int, dropped: int) -> None:
    made = batch([sample("step-0", aborts=1), sample("step-0")], config(aborted=handling))
    assert (len(made.items), made.dropped, made.aborts) == (items, dropped, 1)


def test_a_sample_with_nothing_to_learn_from_is_counted_as_dropped() -> None:
    made = batch([sample(aborts=1), sample("step-0")])
    assert (len(made.items), made.dropped) == (1, 1)


@pytest.mark.parametrize("change", [{"logprob_mode": "raw"}, {"temperature": 0.7}])
def test_logprobs_of_another_mode_or_temperature_are_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(Conflict, match=next(iter(change))):
        batch([sample("step-0"), replace(sample("step-0"), **change)])


def test_the_baseline_is_the_mean_of_the_whole_group() -> None:
    made = batch([sample("step-0"), sample("step-0"), sample("step-0")])
    assert [item.advantage for item in made.items] == [-1.0, 0.0, 1.0]
    assert made.solved == pytest.approx(2 / 3)
    assert made.tokens == 3


def test_groups_with_equal_rewards_are_left_out_where_they_are_replaced() -> None:
    groups = [
        *grouped([sample("step-0")] * 2, [1.0, 1.0]),
        *grouped([sample("step-0")] * 2, [0.0, 1.0]),
    ]
    clock, dapo = Clock({"step-0": 0}), TrainConfig.of({"loss": {"kind": "dapo", "overlong": 0}})
    made = make_batch(groups, clock, 0, dapo, 0)
    assert [item.advantage for item in made.items] == pytest.approx([-1, 1], abs=1e-5)
    assert (made.uniform, made.rewards, made.tokens) == (1, (1.0, 1.0, 0.0, 1.0), 4)
    # A batch of nothing else is learnt from as it is: its advantages are all 0.
    alike = make_batch(groups[:1], clock, 0, dapo, 0)
    assert ([item.advantage for item in alike.items], alike.uniform) == ([0.0, 0.0], 0)
    assert len(make_batch(groups, clock, 0, TrainConfig(), 0).items) == 4


def test_a_long_turn_loses_up_to_1_of_its_reward() -> None:
    """Of 8 tokens, the reward falls over the last 4."""
    settings = {"rollout": {"max_tokens": 8}, "loss": {"overlong": 4, "baseline": "group"}}
    samples = [sample(*["step-0"] * length) for length in (3, 4, 5, 8)]
    groups = grouped(samples, [1.0] * 4)
    made = make_batch(groups, Clock({"step-0": 0}), 0, TrainConfig.of(settings), 0)
    shaped = [1.0, 1.0, 0.75, 0.0]
    assert [item.advantage for item in made.items] == [own - 0.6875 for own in shaped]
    assert made.rewards == (1.0,) * 4


@pytest.mark.parametrize(("kind", "advantages"), [
    ("rloo", [-1.5, 0.0, 1.5]), ("dr_grpo", [-1.0, 0.0, 1.0]), ("grpo", [-1.2247, 0.0, 1.2247]),
])  # fmt: skip
def test_an_algorithm_brings_its_own_baseline(kind: str, advantages: list[float]) -> None:
    made = batch([sample("step-0")] * 3, TrainConfig.of({"loss": {"kind": kind}}))
    assert [item.advantage for item in made.items] == pytest.approx(advantages, abs=1e-3)
