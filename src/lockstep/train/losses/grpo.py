"""GRPO with a trust region by masking, and a penalty on the squared log ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import Ratio


@dataclass(frozen=True, slots=True)
class Masks:
    """Tokens that are left out of the loss because trainer and engine are too far apart there."""

    low_N: Tensor
    high_N: Tensor

    @property
    def any_N(self) -> Tensor:
        return self.low_N | self.high_N


def trust_region(
    ratio: Ratio, advantages: Tensor, *, mask: str, mask_low: float, mask_high: float
) -> Masks:
    """Which tokens to mask.

    dppo: a probability that moved further than allowed in the direction the advantage pushes it.
    ipo: a probability that moved further than allowed in any direction. none: nothing.
    """
    high = ratio.moved_N > mask_high
    low = ratio.moved_N < -mask_low
    if mask == "dppo":
        return Masks(low & (advantages <= 0), high & (advantages > 0))
    if mask == "ipo":
        return Masks(low, high)
    return Masks(torch.zeros_like(low), torch.zeros_like(high))


def grpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    *,
    mask: str = "dppo",
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    kl: float = 1e-3,
) -> TokenLoss:
    """-(keep * A * r) + kl * log_r^2, where `keep` is 0 for tokens outside the trust region."""
    ratio = Ratio.of(logprobs, old_logprobs)
    masks = trust_region(ratio, advantages, mask=mask, mask_low=mask_low, mask_high=mask_high)
    keep = (~masks.any_N).to(ratio.r_N.dtype)
    values = -(keep * advantages * ratio.r_N) + kl * ratio.log_r_N.square()
    # `where` and not a product: 0 times an infinite ratio would be NaN.
    return TokenLoss(
        torch.where(token_mask, values, torch.zeros_like(values)),
        {
            "is_masked": masks.any_N,
            "is_masked_low": masks.low_N,
            "is_masked_high": masks.high_N,
        },
    )
