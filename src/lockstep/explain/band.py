"""The healthy band: how far two correct implementations of one arithmetic may differ.

The band is measured on the samples and weights in question and not assumed: 32-bit arithmetic by
rounding errors put into the weights, 16-bit arithmetic by computing in it. It therefore does not
depend on the vector instructions of the machine that explains.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from lockstep.explain.case import Case, Values
from lockstep.explain.scorer import Scorer
from lockstep.explain.setting import Setting

ULP = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Largest relative error of rounding to each dtype."""
FACTORS = {"float32": (4.0, 4.0), "bfloat16": (2.0, 4.0), "float16": (2.0, 4.0)}
"""The band is this many times the measured mean and highest difference. In float32 one rounding of
all weights is measured, and an engine rounds several times per layer."""
FLOORS = {"float32": (4e-6, 5e-5), "bfloat16": (1e-3, 2e-2), "float16": (1e-4, 2e-3)}
"""Least mean and highest difference of a band. Logprobs are sent as float32, and logits of size 30
have errors of 2e-6 in it."""
LARGEST = 50.0
"""Differences are cut here, because a token that could not be drawn has the logprob -inf."""


@dataclass(frozen=True, slots=True)
class Band:
    """Bounds of |difference| per token: of the mean, and of all but one token in a thousand.

    `source` says how it was found, in words for a report.
    """

    mean: float
    high: float
    dtype: str
    source: str

    def wider(self, mean: float, high: float, source: str) -> Band:
        """Return a band that also allows these differences, which an engine shows by itself."""
        if mean <= self.mean and high <= self.high:
            return self
        return Band(max(mean, self.mean), max(high, self.high), self.dtype, source)

    def holds(self, difference: Values) -> bool:
        """Return whether these differences are healthy. NaN, a missing number, is not compared."""
        sizes = sizes_of(difference)
        if not len(sizes):
            return False
        beyond = int((sizes > self.high).sum())
        # A mean over few tokens scatters more than one over many.
        mean = self.mean * (1 + 3 / np.sqrt(len(sizes)))
        return bool(sizes.mean() <= mean and beyond <= len(sizes) // 1000)


def sizes_of(difference: Values) -> Values:
    """Return |difference| of the compared tokens, cut at LARGEST."""
    compared = difference[~np.isnan(difference)]
    return np.minimum(np.abs(compared), LARGEST)


def measure(scorer: Scorer, base: Setting, dtype: str) -> Band:
    """Return the band of an implementation that computes in `dtype`."""
    reference = scorer.values(base)
    if dtype == "float32":
        noisy = scorer.values(base.with_(jitter=ULP[dtype] * 2))
        source = "effect of rounding errors in all weights"
    else:
        noisy = scorer.values(base.with_(compute=dtype, rounding=None))
        source = f"difference of {dtype} and float32 arithmetic on the same weights"
    sizes = sizes_of(noisy - reference)
    mean, high = float(sizes.mean()), float(sizes.max())
    (mean_factor, high_factor), (least_mean, least_high) = FACTORS[dtype], FLOORS[dtype]
    return Band(
        max(mean_factor * mean, least_mean), max(high_factor * high, least_high), dtype, source
    )


def self_noise(case: Case, target: Values) -> tuple[float, float, int]:
    """Return mean and highest difference of equal tokens after equal prefixes, and their number.

    The samples of one group share their prompt, so that some first tokens are drawn twice. Under
    one version a correct worker gives them one logprob up to its own noise.
    """
    same: dict[object, list[float]] = defaultdict(list)
    for group in case.groups:
        sample = case.samples[group.sample]
        for at in range(group.start, min(group.end, group.start + 4)):
            shaping = [s.shaping for s in sample.shaping if s.start <= at < s.end]
            key = (
                group.version, tuple(sample.token_ids[: at + 1]), sample.logprob_mode,
                sample.temperature, repr(shaping), sample.adapter, sample.workers,
            )  # fmt: skip
            same[key].append(float(target[group.first + at - group.start]))
    spread = [max(values) - min(values) for values in same.values() if len(values) > 1]
    if not spread:
        return 0.0, 0.0, 0
    return float(np.mean(spread)), float(np.max(spread)), len(spread)
