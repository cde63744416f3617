"""DPPO and IPO against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.train.losses.dppo import dppo
from lockstep.train.losses.ipo import ipo
from lockstep.train.losses.loss import TokenLoss

T = torch.tensor
ALL = torch.ones(4, dtype=torch.bool)


def outside(loss: TokenLoss, side: str) -> list[bool]:
    """Which tokens the trust region leaves out."""
    masked: list[bool] = loss.metrics[f"is_masked{side}"].tolist()
    return masked


def test_dppo_masks_tokens_that_moved_too_far_in_the_direction_of_the_advantage() -> None:
    trainer, engine = T([0.6, 0.1, 0.6, 0.1]).log(), T([0.3, 0.4, 0.3, 0.4]).log()
    up = dppo(trainer, engine, torch.full((4,), 1.0), ALL)
    assert outside(up, "_high") == [True, False, True, False]
    assert not any(outside(up, "_low"))
    down = dppo(trainer, engine, torch.full((4,), -1.0), ALL)
    assert outside(down, "_low") == [False, True, False, True]
    assert not any(outside(down, "_high"))
    zero = dppo(trainer, engine, torch.zeros(4), ALL)
    assert outside(zero, "") == [False, True, False, True]


def test_ipo_masks_either_direction() -> None:
    trainer, engine = T([0.45, 0.25, 0.35, 0.3]).log(), T([0.3, 0.4, 0.3, 0.3]).log()
    masked = ipo(trainer, engine, torch.ones(4), ALL, mask_low=0.1, mask_high=0.1)
    assert outside(masked, "") == [True, True, False, False]


def test_the_loss_is_minus_advantage_times_ratio_plus_the_squared_log_ratio() -> None:
    trainer, engine = T([0.5, 0.3, 0.9]).log(), T([0.4, 0.3, 0.3]).log()
    loss = dppo(trainer, engine, torch.full((3,), 2.0), ALL[:3])
    logs = [math.log(0.5 / 0.4), 0.0, math.log(3)]
    by_hand = -2.0 * (1.25 + 1.0) + 1e-3 * sum(log * log for log in logs)
    assert float(loss.values.sum()) == pytest.approx(by_hand, abs=1e-5)
    assert outside(loss, "") == [False, False, True]


def test_tokens_outside_the_mask_add_nothing_even_if_their_ratio_is_infinite() -> None:
    trainer = T([-1.0, 100.0], requires_grad=True)
    loss = dppo(trainer, T([-1.0, 0.0]), torch.ones(2), T([True, False]))
    assert float(loss.values.sum().detach()) == -1.0


def test_the_gradient_at_equal_logprobs_is_minus_the_advantage() -> None:
    trainer = T([-1.0, -2.0], requires_grad=True)
    loss = dppo(trainer, trainer.detach(), T([0.5, -0.25]), T([True, True]))
    loss.values.sum().backward()
    assert trainer.grad is not None
    assert trainer.grad.tolist() == [-0.5, 0.25]
