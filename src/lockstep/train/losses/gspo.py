"""GSPO: PPO's clipped surrogate with one ratio for a whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import clipped_surrogate


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_ratio_mask: Tensor,
    lengths: Sequence[int],
    *,
    clip_low_threshold: float = 0.9997,
    clip_high_threshold: float = 1.0004,
) -> TokenLoss:
    """-min(s * A, clip(s, low, high) * A), averaged over each sequence, then over the sequences.

    s = exp(mean of the sequence's log ratios). A = (R - mean of the group) / standard deviation.
    """
    weights = sequence_ratio_mask
    log_ratio = torch.where(weights != 0, logprobs - old_logprobs, torch.zeros_like(logprobs))
    means = [
        ((own * weight).sum() / weight.sum().clamp(min=1.0)).expand(len(own))
        for own, weight in zip(log_ratio.split(lengths), weights.split(lengths), strict=True)
    ]
    # The value of the sequence's ratio, with the gradient of each token's own logprob.
    ratio = (torch.cat(means).detach() + logprobs - logprobs.detach()).exp()
    return TokenLoss(clipped_surrogate(ratio, advantages, clip_low_threshold, clip_high_threshold))
