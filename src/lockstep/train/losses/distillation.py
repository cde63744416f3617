"""Divergences of the student's whole distribution from the teacher's, at every sampled token.

They take the logprobs of all tokens of the vocabulary, or of the teacher's likeliest tokens and of
all others together: t of the teacher, s of the student.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.train.losses.loss import TokenLoss


def forward_kl(student_distribution: Tensor, teacher_distribution: Tensor) -> TokenLoss:
    """KL(teacher || student) = sum of exp(t) * (t - s). It covers all that the teacher may say."""
    values = _kl(teacher_distribution, student_distribution)
    return TokenLoss(values, {"ref_kl": values})


def reverse_kl(student_distribution: Tensor, teacher_distribution: Tensor) -> TokenLoss:
    """KL(student || teacher) = sum of exp(s) * (s - t). It avoids what the teacher does not say."""
    values = _kl(student_distribution, teacher_distribution)
    return TokenLoss(values, {"ref_kl": values})


def jsd(
    student_distribution: Tensor, teacher_distribution: Tensor, *, beta: float = 0.5
) -> TokenLoss:
    """beta * KL(teacher || m) + (1 - beta) * KL(student || m), m = beta * teacher + (1 - beta) *
    student.

    Divided by beta * (1 - beta), it tends to the forward KL for small beta and to the reverse KL
    for large.
    """
    mixed = torch.logaddexp(
        teacher_distribution + math.log(beta), student_distribution + math.log1p(-beta)
    )
    values = beta * _kl(teacher_distribution, mixed) + (1 - beta) * _kl(student_distribution, mixed)
    return TokenLoss(values, {"ref_kl": values})


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
