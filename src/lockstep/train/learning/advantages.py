"""Advantages: how much better than its group each rollout was."""

from __future__ import annotations

from collections.abc import Sequence


def advantages(rewards: Sequence[float], *, normalize_std: bool = False) -> list[float]:
    """Return each reward less the group's mean; with `normalize_std`, over its deviation."""
    if not rewards:
        return []
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    deviation = (sum(value * value for value in centred) / len(centred)) ** 0.5
    return [value / (deviation + 1e-6) for value in centred]
