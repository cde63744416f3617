"""Advantages: how much better than its group, or its batch, each rollout was."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.train.losses.loss import Baseline

SMALL = 1e-6
"""Added to standard deviations, so that equal rewards have advantage 0."""


def advantages(
    groups: Sequence[Sequence[float]], baseline: Baseline = "group"
) -> list[list[float]]:
    """Return the advantage of each reward R of each group.

    group: R - mean. group_std: (R - mean) / (standard deviation + 1e-6). leave_one_out: R - mean of
    the group's other rewards. batch: as group_std, over all groups at once. Standard deviations
    divide by the number of rewards.
    """
    if baseline == "batch":
        flat = iter(_centred([reward for group in groups for reward in group], by_std=True))
        return [[next(flat) for _ in group] for group in groups]
    if baseline == "leave_one_out":
        factors = [len(group) / max(len(group) - 1, 1) for group in groups]
        pairs = zip(groups, factors, strict=True)
        return [[value * factor for value in _centred(group)] for group, factor in pairs]
    return [_centred(group, by_std=baseline == "group_std") for group in groups]


def _centred(rewards: Sequence[float], *, by_std: bool = False) -> list[float]:
    if not rewards:
        return []
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not by_std:
        return centred
    deviation = (sum(value * value for value in centred) / len(centred)) ** 0.5
    return [value / (deviation + SMALL) for value in centred]
