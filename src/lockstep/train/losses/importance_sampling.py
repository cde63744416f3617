"""Importance sampling: a policy gradient weighted by the ratio, without clipping."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import masked_ratio


def importance_sampling(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, token_mask: Tensor
) -> TokenLoss:
    """-r * A, with r = exp(logprob - old logprob)."""
    return TokenLoss(-(masked_ratio(logprobs, old_logprobs, token_mask) * advantages))
