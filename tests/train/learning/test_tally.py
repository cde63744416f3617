"""The metrics of a step: means over the tokens that were learnt from."""

from __future__ import annotations

import math

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


def test_a_loss_that_masks_nothing_reports_no_masked_tokens() -> None:
    tally = Tally()
    tally.add(Ratio.of(torch.zeros(3), torch.zeros(3)), torch.ones(3), ALL, {})
    assert tally.means()["is_masked"] == tally.means()["is_masked_high"] == 0.0
