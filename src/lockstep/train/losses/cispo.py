"""CISPO: a policy gradient whose importance weights are clipped and carry no gradient."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import masked_ratio


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> TokenLoss:
    """-stop_gradient(clip(r, low, high)) * logprob * A, averaged over the tokens of all sequences.

    A = (R - mean of the group) / standard deviation of the group.
    """
    ratio = masked_ratio(logprobs, old_logprobs, token_mask)
    weights = ratio.clamp(clip_low_threshold, clip_high_threshold).detach()
    return TokenLoss(-(weights * logprobs * advantages))
