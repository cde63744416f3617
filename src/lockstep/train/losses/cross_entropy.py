"""Weighted cross entropy, for supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss


def cross_entropy(logprobs: Tensor, weights: Tensor) -> TokenLoss:
    """-w * logprob."""
    return TokenLoss(-(weights * logprobs))
