"""The GRPO loss against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.train.losses.grpo import grpo, trust_region
from lockstep.train.losses.ratio import Ratio

T = torch.tensor
LIMITS = {"mask_low": 0.2, "mask_high": 0.2}


def ratio(trainer: list[float], engine: list[float]) -> Ratio:
    """The ratio of probabilities."""
    return Ratio.of(T(trainer).log(), T(engine).log())


def test_dppo_masks_tokens_that_moved_too_far_in_the_direction_of_the_advantage() -> None:
    moved = ratio([0.6, 0.1, 0.6, 0.1], [0.3, 0.4, 0.3, 0.4])
    up = trust_region(moved, torch.full((4,), 1.0), mask="dppo", **LIMITS)
    assert up.high_N.tolist() == [True, False, True, False]
    assert not up.low_N.any()
    down = trust_region(moved, torch.full((4,), -1.0), mask="dppo", **LIMITS)
    assert down.low_N.tolist() == [False, True, False, True]
    assert not down.high_N.any()
    zero = trust_region(moved, torch.zeros(4), mask="dppo", **LIMITS)
    assert zero.any_N.tolist() == [False, True, False, True]


def test_ipo_masks_either_direction_and_none_masks_nothing() -> None:
    moved = ratio([0.45, 0.25, 0.35], [0.3, 0.4, 0.3])
    masks = trust_region(moved, torch.ones(3), mask="ipo", mask_low=0.1, mask_high=0.1)
    assert masks.any_N.tolist() == [True, True, False]
    assert not trust_region(moved, torch.ones(3), mask="none", **LIMITS).any_N.any()


def test_the_loss_is_minus_advantage_times_ratio_plus_the_squared_log_ratio() -> None:
    trainer, engine = T([0.5, 0.3, 0.9]).log(), T([0.4, 0.3, 0.3]).log()
    loss = grpo(trainer, engine, torch.full((3,), 2.0), torch.ones(3, dtype=torch.bool))
    logs = [math.log(0.5 / 0.4), 0.0, math.log(3)]
    by_hand = -2.0 * (1.25 + 1.0) + 1e-3 * sum(log * log for log in logs)
    assert float(loss.values.sum()) == pytest.approx(by_hand, abs=1e-5)
    assert loss.metrics["is_masked"].tolist() == [False, False, True]


def test_tokens_outside_the_mask_add_nothing_even_if_their_ratio_is_infinite() -> None:
    trainer = T([-1.0, 100.0], requires_grad=True)
    loss = grpo(trainer, T([-1.0, 0.0]), torch.ones(2), T([True, False]))
    assert float(loss.values.sum().detach()) == -1.0


def test_the_gradient_at_equal_logprobs_is_minus_the_advantage() -> None:
    trainer = T([-1.0, -2.0], requires_grad=True)
    loss = grpo(trainer, trainer.detach(), T([0.5, -0.25]), T([True, True]))
    loss.values.sum().backward()
    assert trainer.grad is not None
    assert trainer.grad.tolist() == [-0.5, 0.25]
