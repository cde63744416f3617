"""The arithmetic of the loss, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.tokens.errors import Misaligned
from lockstep.train.config import LossConfig
from lockstep.train.learning.distill import distill_loss, reverse_kl
from lockstep.train.learning.loss import Ratio, Tally, advantages, masks, policy_loss

T = torch.tensor
ALL = T([[True, True, True]])


def ratio(trainer: list[float], engine: list[float]) -> Ratio:
    """The ratio of probabilities."""
    return Ratio.of(T([trainer]).log(), T([engine]).log())


def test_an_advantage_is_the_reward_less_the_mean_of_its_group() -> None:
    assert advantages([1.0, 0.0, 0.5, 0.5]) == [0.5, -0.5, 0.0, 0.0]
    assert advantages([]) == []
    scaled = advantages([1.0, 0.0], normalize_std=True)
    assert scaled == pytest.approx([1.0, -1.0], abs=1e-5)
    assert advantages([0.7, 0.7], normalize_std=True) == [0.0, 0.0]


def test_mismatch_kl_is_k3_and_exactly_zero_for_equal_logprobs() -> None:
    between = ratio([0.5, 0.2, 0.3], [0.25, 0.2, 0.6])
    by_hand = [2 - math.log(2) - 1, 0.0, 0.5 - math.log(0.5) - 1]
    assert between.mismatch_kl_BT[0].tolist() == pytest.approx(by_hand, abs=1e-6)
    assert between.mismatch_kl_BT[0, 1] == 0.0


def test_dppo_masks_what_moved_too_far_where_the_advantage_pushes() -> None:
    moved = ratio([0.6, 0.1, 0.6, 0.1], [0.3, 0.4, 0.3, 0.4])
    up = masks(moved, torch.full((1, 4), 1.0), LossConfig())
    assert up.high_BT[0].tolist() == [True, False, True, False]
    assert not up.low_BT.any()
    down = masks(moved, torch.full((1, 4), -1.0), LossConfig())
    assert down.low_BT[0].tolist() == [False, True, False, True]
    assert not down.high_BT.any()
    zero = masks(moved, torch.zeros((1, 4)), LossConfig())
    assert zero.any_BT[0].tolist() == [False, True, False, True]


def test_ipo_masks_either_direction_and_none_masks_nothing() -> None:
    moved = ratio([0.45, 0.25, 0.35], [0.3, 0.4, 0.3])
    config = LossConfig(mask="ipo", mask_low=0.1, mask_high=0.1)
    assert masks(moved, torch.ones(1, 3), config).any_BT[0].tolist() == [True, True, False]
    assert not masks(moved, torch.ones(1, 3), LossConfig(mask="none")).any_BT.any()


def test_the_loss_is_minus_advantage_times_ratio_plus_the_squared_log_ratio() -> None:
    moved = ratio([0.5, 0.3, 0.9], [0.4, 0.3, 0.3])
    advantage = torch.full((1, 3), 2.0)
    masked = masks(moved, advantage, LossConfig())
    loss = policy_loss(moved, masked, advantage, ALL, LossConfig())
    logs = [math.log(0.5 / 0.4), 0.0, math.log(3)]
    by_hand = -2.0 * (1.25 + 1.0) + 1e-3 * sum(log * log for log in logs)
    assert float(loss) == pytest.approx(by_hand, abs=1e-5)


def test_what_is_not_learnt_from_adds_nothing_even_if_it_is_infinite() -> None:
    trainer = T([[-1.0, 100.0]], requires_grad=True)
    between = Ratio.of(trainer, T([[-1.0, 0.0]]))
    learn = T([[True, False]])
    masked = masks(between, torch.ones(1, 2), LossConfig())
    loss = policy_loss(between, masked, torch.ones(1, 2), learn, LossConfig())
    assert float(loss.detach()) == -1.0


def test_the_gradient_at_equal_logprobs_is_minus_the_advantage() -> None:
    trainer = T([[-1.0, -2.0]], requires_grad=True)
    between = Ratio.of(trainer, trainer.detach())
    advantage = T([[0.5, -0.25]])
    masked = masks(between, advantage, LossConfig())
    policy_loss(between, masked, advantage, T([[True, True]]), LossConfig()).backward()
    assert trainer.grad is not None
    assert trainer.grad[0].tolist() == [-0.5, 0.25]


def test_metrics_are_means_over_the_tokens_learnt_from() -> None:
    moved = ratio([0.6, 0.2, 0.5], [0.3, 0.2, 0.5])
    advantage = torch.ones(1, 3)
    tally = Tally()
    tally.add(
        moved, masks(moved, advantage, LossConfig()), advantage, ALL, entropy=T([[3.0, 0, 0]])
    )
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


def test_logprobs_of_other_lengths_are_refused() -> None:
    with pytest.raises(Misaligned, match=r"\(1, 2\), the engine's \(1, 3\)"):
        Ratio.of(torch.zeros(1, 2), torch.zeros(1, 3))


def test_distillation_pushes_up_what_the_teacher_finds_likelier() -> None:
    trainer = T([[-1.0, -2.0]], requires_grad=True)
    teacher = T([[-0.5, -3.0]])
    between = Ratio.of(trainer, trainer.detach())
    loss, _, advantage = distill_loss(between, trainer, teacher, T([[True, True]]), LossConfig())
    loss.backward()
    assert advantage[0].tolist() == [0.5, -1.0]
    assert trainer.grad is not None
    assert trainer.grad[0].tolist() == [-0.5, 1.0]
    assert reverse_kl(trainer, trainer.detach()).tolist() == [[0.0, 0.0]]
    assert bool((reverse_kl(trainer, teacher) > 0).all())
