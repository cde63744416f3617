"""Dr. GRPO: GRPO without its two biases, of length and of difficulty."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import clipped_surrogate, masked_ratio


def dr_grpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    token_mask: Tensor,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> TokenLoss:
    """-min(r * A, clip(r, low, high) * A), summed and divided by a constant length.

    A = R - mean of the group. GRPO's mean over a sequence weakens the tokens of long sequences, and
    its division by the standard deviation strengthens questions that are too easy or too hard.
    """
    ratio = masked_ratio(logprobs, old_logprobs, token_mask)
    return TokenLoss(clipped_surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold))
