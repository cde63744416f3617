"""The metrics of a step: means over the tokens that were learnt from."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch

from lockstep.train.learning.tally import Tally
from lockstep.train.losses.ratio import Ratio

T = torch.tensor
ALL = T([True, True, True])


def test_metrics_are_means_over_the_tokens_learnt_from() -> None:
    ratio = Ratio.of(T([0.6, 0.2, 0.5]).log(), T([0.3, 0.2, 0.5]).log())
    masked = T([True, False, False])
    metrics = {
        "is_masked": masked,
        "is_masked_low": ~ALL,
        "is_masked_high": masked,
        "entropy": T([3.0, 0, 0]),
    }
    tally = Tally()
    tally.add(ratio, torch.ones(3), ALL, metrics)
    means = tally.means()
    kl = 2 - math.log(2) - 1
    assert means["mismatch_kl"] == pytest.approx(kl / 3, abs=1e-6)
    assert means["masked_mismatch_kl"] == pytest.approx(kl, abs=1e-6)
    assert means["unmasked_mismatch_kl"] == 0.0
    assert means["is_masked"] == means["is_masked_high"] == pytest.approx(1 / 3)
    assert means["is_masked_low"] == 0.0
    assert means["masked_advantage_positive"] == 1.0
    assert means["entropy"] == 1.0
    assert means["mismatch_max"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("difference", [1e-12, -1e-12, 2.5e-5, -2.5e-5, 1e-3, -1e-3, 0.5, -3.0])
def test_mismatch_kl_is_accurate_where_fp32_would_cancel(difference: float) -> None:
    sampler = torch.full((3,), -1.5, dtype=torch.float64)
    kl = Ratio.of(sampler + difference, sampler).mismatch_kl_N
    exact = float((sampler + difference - sampler)[0])
    expected = float(k3_of(exact))
    assert kl.dtype == torch.float64
    assert kl.tolist() == pytest.approx([expected] * 3, rel=1e-9)
    assert bool((kl > 0).all())


def k3_of(x: float) -> Decimal:
    """exp(x) - x - 1 with 60 digits."""
    with localcontext() as context:
        context.prec = 60
        value = Decimal(x)
        return value.exp() - value - 1


def test_mismatch_kl_of_fp32_logprobs_is_not_rounded_to_zero() -> None:
    sampler = T([-1.5, -2.25, -0.0625])
    kl = Ratio.of(sampler + T([2.5e-5, -2.5e-5, 1e-7]), sampler).mismatch_kl_N
    assert bool((kl > 0).all())
    assert float(kl[0]) == pytest.approx(2.5e-5**2 / 2, rel=1e-2)


def test_unequal_logprobs_are_counted_among_those_compared() -> None:
    tally = Tally()
    ratio = Ratio.of(T([-1.0, -2.0, -3.0]), T([-1.0, -2.0000002, -9.0]))
    tally.add(ratio, torch.ones(3), T([True, True, False]), {})
    tally.add(Ratio.of(T([-1.0]), T([-1.0])), torch.ones(1), T([True]), {})
    means = tally.means()
    assert (means["compared_logprobs"], means["unequal_logprobs"]) == (3, 1)


def test_a_loss_that_masks_nothing_reports_no_masked_tokens() -> None:
    tally = Tally()
    tally.add(Ratio.of(torch.zeros(3), torch.zeros(3)), torch.ones(3), ALL, {})
    assert tally.means()["is_masked"] == tally.means()["is_masked_high"] == 0.0
