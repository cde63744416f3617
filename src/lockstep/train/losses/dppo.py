"""DPPO: an unclipped ratio, without tokens that moved too far in the direction of the advantage."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import Ratio
from lockstep.train.losses.trust_region import TrustRegion


def dppo(
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

    With p and q the new and the old probability of the token, `inside` is 0 where A > 0 and
    p - q > mask_high, or A <= 0 and p - q < -mask_low. Else it is 1.
    """
    ratio = Ratio.of(logprobs, old_logprobs)
    fell = (ratio.moved_N < -mask_low) & (advantages <= 0)
    rose = (ratio.moved_N > mask_high) & (advantages > 0)
    return TrustRegion(fell, rose).loss(ratio, advantages, token_mask, kl)
