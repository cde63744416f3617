"""Supervised fine-tuning: weighted cross entropy on tokens that are taken as examples."""

from __future__ import annotations

from torch import Tensor

from lockstep.train.losses.loss import TokenLoss


def sft(logprobs: Tensor, weights: Tensor) -> TokenLoss:
    """-w * logprob.

    In `lockstep train`, w is the reward of the rollout, or 0 for a negative one: with rewards of 0
    and 1 the model imitates its own correct rollouts.
    """
    return TokenLoss(-(weights * logprobs))
