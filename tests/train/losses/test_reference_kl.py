"""Estimates of the divergence from a reference, by enumeration of a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.train.losses.reference_kl import Estimator, reference_kl

P = [0.5, 0.3, 0.15, 0.05]
REFERENCE = [0.25, 0.25, 0.3, 0.2]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_is_that_of_its_formula(estimator: Estimator) -> None:
    own = torch.tensor(P, dtype=torch.float64).log()
    values = reference_kl(estimator, own, torch.tensor(REFERENCE, dtype=torch.float64).log())
    by_hand = []
    for p, reference in zip(P, REFERENCE, strict=True):
        x = math.log(p) - math.log(reference)
        by_hand.append(
            {"k1": x * math.log(p), "k2": x * x / 2, "k3": math.exp(-x) + x - 1}[estimator]
        )
    assert values.tolist() == pytest.approx(by_hand, rel=1e-9, abs=0)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_mean_gradient_over_all_draws_is_that_of_the_divergence(estimator: Estimator) -> None:
    """k3 has this gradient only where policy and reference are close."""
    logits = torch.tensor(P, dtype=torch.float64).log().requires_grad_()
    own, reference = logits.log_softmax(-1), torch.tensor(REFERENCE, dtype=torch.float64).log()
    exact = torch.autograd.grad((own.exp() * (own - reference)).sum(), logits, retain_graph=True)
    drawn = (own.exp().detach() * reference_kl(estimator, own, reference)).sum()
    (mean,) = torch.autograd.grad(drawn, logits)
    assert mean.tolist() == pytest.approx(exact[0].tolist(), rel=1e-9, abs=1e-15)
