"""Estimates of KL(policy || reference) from sampled tokens, as a part of the loss."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def reference_kl(estimator: Estimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the penalty of each token, whose gradient lowers the divergence. x = log p - log ref.

    k1: stop_gradient(x) * log p, a policy gradient with reward -x: the gradient of the loss x
    itself is 0 on average.
    k2: x^2 / 2, whose gradient is the same on policy.
    k3: exp(-x) + x - 1, which is never negative.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio.detach() * logprobs
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio
