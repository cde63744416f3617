"""Ratios of the trainer's and the sampler's probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.tokens.errors import Misaligned
from lockstep.train.losses.ratio import Ratio, masked_ratio

T = torch.tensor


def test_mismatch_kl_is_k3_and_exactly_zero_for_equal_logprobs() -> None:
    ratio = Ratio.of(T([0.5, 0.2, 0.3]).log(), T([0.25, 0.2, 0.6]).log())
    by_hand = [2 - math.log(2) - 1, 0.0, 0.5 - math.log(0.5) - 1]
    assert ratio.mismatch_kl_N.tolist() == pytest.approx(by_hand, abs=1e-6)
    assert ratio.mismatch_kl_N[1] == 0.0


def test_logprobs_of_different_lengths_are_rejected() -> None:
    with pytest.raises(Misaligned, match=r"\(1, 2\), the engine's \(1, 3\)"):
        Ratio.of(torch.zeros(1, 2), torch.zeros(1, 3))


def test_a_masked_ratio_is_one_outside_the_mask() -> None:
    ratio = masked_ratio(T([-1.0, -1.0]), T([-2000.0, -1.0]), T([False, True]))
    assert ratio.tolist() == [1.0, 1.0]
