"""Which tokens a trust region leaves out: those whose probability has moved too far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import Ratio


@dataclass(frozen=True, slots=True)
class TrustRegion:
    """Tokens that are outside the region because their probability fell or rose too far."""

    low_N: Tensor
    high_N: Tensor

    def loss(self, ratio: Ratio, advantages: Tensor, token_mask: Tensor, kl: float) -> TokenLoss:
        """Return -(inside * A * r) + kl * log_r^2, where `inside` is 0 outside the region."""
        outside = self.low_N | self.high_N
        inside = (~outside).to(ratio.r_N.dtype)
        values = -(inside * advantages * ratio.r_N) + kl * ratio.log_r_N.square()
        # `where` and not a product: 0 times an infinite ratio would be NaN.
        return TokenLoss(
            torch.where(token_mask, values, torch.zeros_like(values)),
            {"is_masked": outside, "is_masked_low": self.low_N, "is_masked_high": self.high_N},
        )
