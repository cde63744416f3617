"""Advantages of rollouts, compared with their group or with the batch."""

from __future__ import annotations

import statistics

import pytest

from lockstep.train.learning.advantages import advantages
from lockstep.train.losses.loss import Baseline

GROUPS = [[1.0, 0.0, 0.5, 0.5], [0.25, 0.75, 2.0]]


def by_hand(baseline: Baseline) -> list[list[float]]:
    flat = [reward for group in GROUPS for reward in group]
    rows = []
    for group in GROUPS:
        scope = flat if baseline == "batch" else group
        mean, deviation = statistics.fmean(scope), statistics.pstdev(scope) + 1e-6
        if baseline == "leave_one_out":
            others = [(sum(group) - reward) / (len(group) - 1) for reward in group]
            rows.append([reward - other for reward, other in zip(group, others, strict=True)])
        elif baseline == "group":
            rows.append([reward - mean for reward in group])
        else:
            rows.append([(reward - mean) / deviation for reward in group])
    return rows


@pytest.mark.parametrize("baseline", ["group", "group_std", "leave_one_out", "batch"])
def test_an_advantage_is_that_of_its_definition(baseline: Baseline) -> None:
    for own, expected in zip(advantages(GROUPS, baseline), by_hand(baseline), strict=True):
        assert own == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("baseline", ["group", "group_std", "leave_one_out", "batch"])
def test_equal_rewards_have_no_advantage(baseline: Baseline) -> None:
    assert advantages([[0.75, 0.75], [0.75], []], baseline) == [[0.0, 0.0], [0.0], []]
