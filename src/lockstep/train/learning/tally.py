"""Sums over the tokens of a step, from which its metrics are computed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.train.losses.ratio import Ratio

MASKS = ("is_masked", "is_masked_low", "is_masked_high")
"""Metrics of losses that mask tokens. They are 0 under a loss that masks none."""


class Tally:
    """Sums and counts of each metric; `means` divides them."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._totals: dict[str, float] = {}
        self.mismatch_max = 0.0
        self.compared = 0
        self.unequal = 0

    def add(
        self,
        ratio: Ratio,
        advantages_N: Tensor,
        learn_N: Tensor,
        metrics_N: Mapping[str, Tensor],
    ) -> None:
        """Add the tokens where `learn_N` is true; `metrics_N` are further values to average."""
        metrics = {**dict.fromkeys(MASKS, torch.zeros_like(learn_N)), **metrics_N}
        masked = metrics["is_masked"] & learn_N
        kl = ratio.mismatch_kl_N
        self._add("mismatch_kl", kl, learn_N)
        self._add("masked_mismatch_kl", kl, masked)
        self._add("unmasked_mismatch_kl", kl, learn_N & ~masked)
        self._add("masked_advantage_positive", advantages_N > 0, masked)
        self._add("masked_advantage_negative", advantages_N <= 0, masked)
        for name, values in metrics.items():
            self._add(name, values, learn_N)
        if bool(learn_N.any()):
            differences = ratio.log_r_N.detach()[learn_N].abs()
            self.mismatch_max = max(self.mismatch_max, float(differences.max()))
            self.compared += differences.numel()
            self.unequal += int((differences != 0).sum())  # NaN counts as unequal

    def merge(self, other: Tally) -> None:
        """Add the sums of another tally, such as that of a pass."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._counts[name] = self._counts.get(name, 0) + other._counts[name]
        for name, total in other._totals.items():
            self._totals[name] = self._totals.get(name, 0) + total
        self.mismatch_max = max(self.mismatch_max, other.mismatch_max)
        self.compared += other.compared
        self.unequal += other.unequal

    def count(self, name: str, where_N: Tensor) -> None:
        """Count the tokens where `where_N` is true."""
        self._totals[name] = self._totals.get(name, 0) + int(where_N.sum())

    def _add(self, name: str, values_N: Tensor, where_N: Tensor) -> None:
        values = values_N.detach()[where_N]
        self._sums[name] = self._sums.get(name, 0.0) + float(values.double().sum())
        self._counts[name] = self._counts.get(name, 0) + int(where_N.sum())

    def means(self) -> dict[str, float]:
        """Return every metric; 0 where no token was counted, such as no masked token."""
        means = {
            name: total / self._counts[name] if self._counts[name] else 0.0
            for name, total in self._sums.items()
        }
        return {
            **means,
            **self._totals,
            "mismatch_max": self.mismatch_max,
            "compared_logprobs": self.compared,
            "unequal_logprobs": self.unequal,
        }
