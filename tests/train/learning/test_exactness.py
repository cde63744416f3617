"""Exact mode where trainer and workers compute the same bits; else close mode or an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.backends.transport import ModelCard
from lockstep.tokens.errors import NotExact
from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.config import LearnerConfig
from lockstep.train.learning.exactness import CLOSE_BOUND, Exactness, base_card

PLAN = NumericsPlan(
    arithmetic="exact", device="cpu", dtype="float32", rows=8, mkl="AUTO,STRICT", isa="AVX512",
    torch="2.13.0", fingerprint="a1",
)  # fmt: skip
OTHER_CPU = replace(PLAN, isa="AVX2", fingerprint="b2")
CLOSE = replace(PLAN, arithmetic="close", reason="the self-test failed")


def between(trainer: NumericsPlan, workers: NumericsPlan | None, **learner: Any) -> Exactness:
    return Exactness.between(trainer, workers, LearnerConfig(**learner))


def test_equal_plans_are_exact_and_allow_no_difference() -> None:
    exactness = between(PLAN, PLAN)
    assert (exactness.mode, exactness.reason, exactness.bound) == ("exact", "", 0.0)
    assert exactness.to_json()["workers"] == PLAN.to_json()


@pytest.mark.failure_mode("F70")
@pytest.mark.parametrize(
    ("trainer", "workers", "reason"),
    [
        (PLAN, CLOSE, r"the workers do not compute exactly \(the self-test failed\)"),
        (CLOSE, PLAN, r"the trainer does not compute exactly \(the self-test failed\)"),
        (PLAN, OTHER_CPU, "compute other bits: isa 'AVX512' here, 'AVX2' there"),
        (PLAN, None, "the workers do not report their numerics"),
    ],
)
def test_a_difference_of_the_plans_is_the_reason_for_close_mode(
    trainer: NumericsPlan, workers: NumericsPlan | None, reason: str
) -> None:
    exactness = between(trainer, workers)
    assert exactness.mode == "close"
    assert exactness.bound == CLOSE_BOUND["float32"]
    with pytest.raises(NotExact, match=reason):
        between(trainer, workers, exact=True)


def test_close_mode_can_be_chosen_where_exact_is_possible() -> None:
    exactness = between(PLAN, PLAN, exact=False)
    assert (exactness.mode, exactness.reason) == ("close", "learner.exact is false")
    assert between(PLAN, PLAN, exact=True).is_exact


@pytest.mark.failure_mode("F70")
def test_a_fleet_of_different_workers_has_a_plan_that_is_close() -> None:
    assert PLAN.joined(PLAN) == PLAN
    mixed = PLAN.joined(OTHER_CPU)
    assert not mixed.is_exact
    assert "isa 'AVX512' here, 'AVX2' there" in mixed.reason
    assert between(PLAN, mixed).mode == "close"


def test_the_plan_is_read_from_the_base_model_that_is_trained() -> None:
    cards = [ModelCard("a", numerics=CLOSE), ModelCard("b", numerics=PLAN),
             ModelCard("policy", parent="b")]  # fmt: skip
    assert base_card(cards, "b") == cards[1]
    assert base_card(cards[1:], None) == cards[1]
    assert base_card([], None) is None
