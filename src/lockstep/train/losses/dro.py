"""DRO: a policy gradient with a quadratic penalty on the log ratio."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss


def dro(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float) -> TokenLoss:
    """-(logprob * A - beta / 2 * (logprob - old logprob)^2)."""
    penalty = (logprobs - old_logprobs).square()
    return TokenLoss(-(logprobs * advantages - 0.5 * beta * penalty))
