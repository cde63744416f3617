"""The arithmetic of policy gradients on groups: advantages, ratios, masks, losses, metrics.

Everything here is a function of tensors. Names end in their axes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.tokens.errors import Misaligned
from lockstep.train.config import LossConfig


def advantages(rewards: Sequence[float], *, normalize_std: bool = False) -> list[float]:
    """Each reward of a group less the group's mean; with `normalize_std` over its deviation."""
    if not rewards:
        return []
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    deviation = (sum(value * value for value in centred) / len(centred)) ** 0.5
    return [value / (deviation + 1e-6) for value in centred]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Trainer against engine, token by token: log_r = t - i, r = exp(log_r), and what follows."""

    log_r_BT: Tensor
    r_BT: Tensor
    moved_BT: Tensor
    mismatch_kl_BT: Tensor

    @classmethod
    def of(cls, trainer_BT: Tensor, engine_BT: Tensor) -> Ratio:
        """Raises Misaligned when there is not one trainer logprob for each of the engine's."""
        if trainer_BT.shape != engine_BT.shape:
            raise Misaligned(
                f"trainer logprobs have shape {tuple(trainer_BT.shape)}, the engine's "
                f"{tuple(engine_BT.shape)}"
            )
        log_r = trainer_BT - engine_BT
        r = torch.exp(log_r)
        with torch.no_grad():
            moved = torch.exp(trainer_BT) - torch.exp(engine_BT)
            # k3: an estimate of KL(engine || trainer) that is never negative, and 0 only at r = 1.
            mismatch_kl = r - log_r - 1.0
        return cls(log_r, r, moved, mismatch_kl)


@dataclass(frozen=True, slots=True)
class Masks:
    """Tokens that are left out of the loss because trainer and engine are too far apart there."""

    low_BT: Tensor
    high_BT: Tensor

    @property
    def any_BT(self) -> Tensor:
        return self.low_BT | self.high_BT


def masks(ratio: Ratio, advantage_BT: Tensor, config: LossConfig) -> Masks:
    """Which tokens to mask.

    dppo: a probability that moved further than allowed in the direction the advantage pushes it.
    ipo: one that moved further than allowed at all. none: nothing.
    """
    high = ratio.moved_BT > config.mask_high
    low = ratio.moved_BT < -config.mask_low
    if config.mask == "dppo":
        return Masks(low & (advantage_BT <= 0), high & (advantage_BT > 0))
    if config.mask == "ipo":
        return Masks(low, high)
    return Masks(torch.zeros_like(low), torch.zeros_like(high))


def policy_loss(
    ratio: Ratio, masked: Masks, advantage_BT: Tensor, learn_BT: Tensor, config: LossConfig
) -> Tensor:
    """The sum over tokens of -(keep * A * r) + kl * log_r^2, where `learn_BT` is true."""
    keep = (~masked.any_BT).to(ratio.r_BT.dtype)
    per_token = -(keep * advantage_BT * ratio.r_BT) + config.kl * ratio.log_r_BT.square()
    # `where` and not a product: 0 times an infinite ratio would be NaN.
    return torch.where(learn_BT, per_token, torch.zeros_like(per_token)).sum()


class Tally:
    """Sums over the tokens of a step, from which the metrics are the means."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self.mismatch_max = 0.0

    def add(
        self, ratio: Ratio, masked: Masks, advantage_BT: Tensor, learn_BT: Tensor, **more_BT: Tensor
    ) -> None:
        """Counts the tokens where `learn_BT` is true; `more_BT` are further values to average."""
        gone = masked.any_BT & learn_BT
        kl = ratio.mismatch_kl_BT
        self._mean("mismatch_kl", kl, learn_BT)
        self._mean("masked_mismatch_kl", kl, gone)
        self._mean("unmasked_mismatch_kl", kl, learn_BT & ~gone)
        self._mean("is_masked", masked.any_BT, learn_BT)
        self._mean("is_masked_low", masked.low_BT, learn_BT)
        self._mean("is_masked_high", masked.high_BT, learn_BT)
        self._mean("masked_advantage_positive", advantage_BT > 0, gone)
        self._mean("masked_advantage_negative", advantage_BT <= 0, gone)
        for name, values in more_BT.items():
            self._mean(name, values, learn_BT)
        if bool(learn_BT.any()):
            worst = float(ratio.log_r_BT.detach()[learn_BT].abs().max())
            self.mismatch_max = max(self.mismatch_max, worst)

    def _mean(self, name: str, values_BT: Tensor, where_BT: Tensor) -> None:
        chosen = values_BT.detach()[where_BT]
        self._sums[name] = self._sums.get(name, 0.0) + float(chosen.double().sum())
        self._counts[name] = self._counts.get(name, 0) + int(where_BT.sum())

    def means(self) -> dict[str, float]:
        """Every metric; 0 where there was no token to count, as with no masked ones."""
        means = {
            name: total / self._counts[name] if self._counts[name] else 0.0
            for name, total in self._sums.items()
        }
        return {**means, "mismatch_max": self.mismatch_max}
