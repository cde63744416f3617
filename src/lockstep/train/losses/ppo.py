"""PPO's clipped surrogate."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import clipped_surrogate, masked_ratio


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> TokenLoss:
    """-min(r * A, clip(r, low, high) * A), averaged over the tokens of all sequences."""
    ratio = masked_ratio(logprobs, old_logprobs, token_mask)
    return TokenLoss(clipped_surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold))
