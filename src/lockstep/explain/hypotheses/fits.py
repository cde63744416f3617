"""Search for one number that makes a substitution fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from lockstep.explain.band import sizes_of
from lockstep.explain.case import Values

DIGITS = (1, 2, 3, 4)
GOLDEN = (math.sqrt(5) - 1) / 2


def loss(values: Values, target: Values) -> float:
    """Return the mean |difference| of the compared tokens; infinite if there are none."""
    sizes = sizes_of(values - target)
    return float(sizes.mean()) if len(sizes) else math.inf


def fit(
    function: Callable[[float], Values], target: Values, grid: Sequence[float], steps: int = 24
) -> tuple[float, Values]:
    """Return the argument for which `function` is closest to the target, and its values.

    The minimum is searched around the best point of the ascending `grid`, and numbers with few
    digits are preferred where they fit as well, because people configure such numbers.
    """
    losses = [loss(function(x), target) for x in grid]
    best = int(np.argmin(losses))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(steps):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        if loss(function(left), target) <= loss(function(right), target):
            high = right
        else:
            low = left
    best_x = (low + high) / 2
    if losses[best] <= loss(function(best_x), target):
        best_x = grid[best]
    exact = loss(function(best_x), target)
    for digits in DIGITS:
        short = round(best_x, digits)
        if loss(function(short), target) <= 1.2 * exact + 1e-7:
            return short, function(short)
    return best_x, function(best_x)


def shortest(low: float, high: float) -> float:
    """Return the number with the fewest decimals in (low, high]."""
    for digits in range(1, 7):
        unit = 10.0**-digits
        candidate = math.floor(high / unit + 1e-9) * unit
        if candidate > low:
            return round(candidate, digits)
    return high
