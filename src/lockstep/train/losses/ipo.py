"""IPO: an unclipped ratio, without tokens that moved too far in any direction."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import Ratio
from lockstep.train.losses.trust_region import TrustRegion


def ipo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    kl: float = 1e-3,
) -> TokenLoss:
    """-(inside * A * r) + kl * log_r^2.

    With p and q the new and the old probability of the token, `inside` is 0 where
    p - q > mask_high or p - q < -mask_low. Else it is 1.
    """
    ratio = Ratio.of(logprobs, old_logprobs)
    region = TrustRegion(ratio.moved_N < -mask_low, ratio.moved_N > mask_high)
    return region.loss(ratio, advantages, token_mask, kl)
