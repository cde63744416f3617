"""RLOO: a policy gradient whose baseline is the mean reward of the other rollouts."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss
from lockstep.train.losses.ratio import masked_ratio


def rloo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, token_mask: Tensor
) -> TokenLoss:
    """-r * A, summed and divided by a constant length; r = 1 for tokens of the current weights.

    A = R - mean of the other rewards of the group, which is n / (n - 1) * (R - mean of the group).
    """
    return TokenLoss(-(masked_ratio(logprobs, old_logprobs, token_mask) * advantages))
