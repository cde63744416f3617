"""Ratios of the trainer's and the sampler's probabilities, which most policy losses are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.tokens.errors import Misaligned


@dataclass(frozen=True, slots=True)
class Ratio:
    """Trainer against sampler, token by token: log_r = t - i, r = exp(log_r), and what follows."""

    log_r_N: Tensor
    r_N: Tensor
    moved_N: Tensor
    mismatch_kl_N: Tensor

    @classmethod
    def of(cls, trainer_N: Tensor, sampler_N: Tensor) -> Ratio:
        """Raises Misaligned unless there is one trainer logprob for each of the sampler's."""
        if trainer_N.shape != sampler_N.shape:
            raise Misaligned(
                f"trainer logprobs have shape {tuple(trainer_N.shape)}, the engine's "
                f"{tuple(sampler_N.shape)}"
            )
        log_r = trainer_N - sampler_N
        r = torch.exp(log_r)
        with torch.no_grad():
            moved = torch.exp(trainer_N) - torch.exp(sampler_N)
            mismatch_kl = _k3(trainer_N.double() - sampler_N.double())
        return cls(log_r, r, moved, mismatch_kl)


def _k3(log_r_N: Tensor) -> Tensor:
    """Return exp(x) - x - 1 in fp64: an estimate of KL(sampler || trainer) that is never negative,
    and 0 only at x = 0.

    For small x the terms cancel: fp32 gives 0 at 1e-5, where the value is 5e-11. There the first
    terms of its series are exact to 1e-11.
    """
    series = log_r_N * log_r_N * (1 / 2 + log_r_N * (1 / 6 + log_r_N / 24))
    return torch.where(log_r_N.abs() < 1e-3, series, torch.expm1(log_r_N) - log_r_N)


def masked_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs) where `mask` is true, and 1 elsewhere.

    Prompt tokens have an old logprob of 0: a ratio that overflows there would turn an advantage of
    0 into NaN.
    """
    log_ratio = logprobs - old_logprobs
    return torch.where(mask, log_ratio, torch.zeros_like(log_ratio)).exp()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return PPO's loss of each token, -min(r * A, clip(r, low, high) * A)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
