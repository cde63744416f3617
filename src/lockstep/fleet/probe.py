"""What a fleet concludes from scores: whether its workers agree, and whether anything changed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from lockstep.wire.probe import Probe, Scores, Verdict, builtin, compare

__all__ = ["Probe", "Scores", "Verdict", "agree", "builtin", "compare", "differs"]


def agree(scores: Mapping[str, Scores], tolerance: float = 0.0) -> Verdict:
    """Whether all workers, by name, answered the same; `where` names the one farthest from all.

    Nobody asked is nothing proved, and NaN agrees with nothing.
    """
    if not scores:
        return Verdict(False, math.inf, "no worker was asked")
    names = list(scores)
    counts = [[len(row) for row in scores[name]] for name in names]
    for name, count in zip(names, counts, strict=True):
        usual = max(counts, key=counts.count)
        if count != usual:
            where = f"worker {name} gave {count} logprobs per sequence instead of {usual}"
            return Verdict(False, math.inf, where)
    table = np.array([[p for row in scores[name] for p in row] for name in names], dtype=np.float64)
    if not table.size:
        return Verdict(False, math.inf, "no logprob was asked for")
    broken = ~np.isfinite(table)
    if broken.any():
        return Verdict(False, math.inf, f"worker {names[int(broken.any(1).argmax())]}: not finite")
    spread = float((table.max(0) - table.min(0)).max())
    if spread <= tolerance:
        return Verdict(True, spread)
    away = np.abs(table - np.median(table, axis=0))
    worker = int(away.max(1).argmax())
    sequence, token = _place(counts[0], int(away[worker].argmax()))
    where = f"worker {names[worker]}, token {token + 1} of sequence {sequence}"
    return Verdict(False, spread, where)


def differs(new: Scores, old: Scores, tolerance: float = 0.0) -> bool:
    """Whether the weights changed at all, as far as the probe can see."""
    return not compare(old, new, tolerance).passed


def _place(lengths: list[int], at: int) -> tuple[int, int]:
    """Sequence and place in it of the number at `at` of all sequences end to end."""
    for sequence, length in enumerate(lengths):
        if at < length:
            return sequence, at
        at -= length
    raise IndexError(at)
