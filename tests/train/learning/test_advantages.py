"""Advantages of the rollouts of a group."""

from __future__ import annotations

import pytest

from lockstep.train.learning.advantages import advantages


def test_an_advantage_is_the_reward_less_the_mean_of_its_group() -> None:
    assert advantages([1.0, 0.0, 0.5, 0.5]) == [0.5, -0.5, 0.0, 0.0]
    assert advantages([]) == []
    scaled = advantages([1.0, 0.0], normalize_std=True)
    assert scaled == pytest.approx([1.0, -1.0], abs=1e-5)
    assert advantages([0.7, 0.7], normalize_std=True) == [0.0, 0.0]
