"""Distillation: advantages and the reverse KL from a teacher's logprobs."""

from __future__ import annotations

import torch

from lockstep.train.learning.teacher import reverse_kl, teacher_advantages
from lockstep.train.losses.dppo import dppo

T = torch.tensor


def test_distillation_pushes_up_tokens_that_the_teacher_finds_likelier() -> None:
    trainer = T([-1.0, -2.0], requires_grad=True)
    teacher = T([-0.5, -3.0])
    advantages = teacher_advantages(trainer, teacher)
    assert advantages.tolist() == [0.5, -1.0]
    loss = dppo(trainer, trainer.detach(), advantages, T([True, True]))
    loss.values.sum().backward()
    assert trainer.grad is not None
    assert trainer.grad.tolist() == [-0.5, 1.0]


def test_the_reverse_kl_is_zero_only_for_equal_logprobs() -> None:
    trainer, teacher = T([-1.0, -2.0]), T([-0.5, -3.0])
    assert reverse_kl(trainer, trainer).tolist() == [0.0, 0.0]
    assert bool((reverse_kl(trainer, teacher) > 0).all())
