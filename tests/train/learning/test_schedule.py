"""Learning rates of the steps of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lockstep.train.config import LearnerConfig
from lockstep.train.learning.schedule import learning_rate


def rates(**options: Any) -> list[float]:
    learner = LearnerConfig(lr=1.0, **options)
    return [learning_rate(learner, step, 8) for step in range(1, 11)]


def test_the_rate_rises_over_the_warmup_and_stays() -> None:
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 7


def test_a_linear_schedule_falls_to_its_end_and_stays_there() -> None:
    falling = [1.0 - at / 6 * 0.75 for at in range(1, 7)]
    expected = [0.5, 1.0, *falling, 0.25, 0.25]
    assert rates(warmup_steps=2, schedule="linear", lr_min=0.25) == pytest.approx(expected)


def test_a_cosine_schedule_ends_where_it_is_set_to() -> None:
    own = rates(schedule="cosine", decay_steps=5)
    assert own == pytest.approx(
        [(1 + math.cos(math.pi * min(at / 5, 1))) / 2 for at in range(1, 11)]
    )
    assert own[4] == own[9] == 0.0
