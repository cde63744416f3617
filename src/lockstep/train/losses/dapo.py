"""DAPO: GRPO with more room for unlikely tokens, and every token counting alike."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import clipped_surrogate, masked_ratio


def dapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.28,
) -> TokenLoss:
    """-min(r * A, clip(r, low, high) * A), averaged over the tokens of all sequences.

    `high` is further from 1 than `low` ("clip-higher"), which lets unlikely tokens grow.
    A = (R - mean of the group) / standard deviation of the group. Groups whose rewards are all
    equal are replaced by others, and long rollouts lose reward (see `LossConfig`).
    """
    ratio = masked_ratio(logprobs, old_logprobs, token_mask)
    return TokenLoss(clipped_surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold))
