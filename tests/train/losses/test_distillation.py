"""Divergences from the teacher in float64 against sums written out by hand, and their gradients."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from lockstep.train.losses.loss_table import LOSSES

Rows = list[list[float]]
DRAWS = random.Random(3)


def distribution() -> list[float]:
    """Log probabilities over five tokens."""
    scores = [DRAWS.gauss(0, 2) for _ in range(5)]
    total = math.log(math.fsum(map(math.exp, scores)))
    return [score - total for score in scores]


STUDENT: Rows = [distribution() for _ in range(4)]
TEACHER: Rows = [distribution() for _ in range(4)]


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def jsd(beta: float) -> Callable[[list[float], list[float]], float]:
    def of(student: list[float], teacher: list[float]) -> float:
        mixed = [
            math.log(beta * math.exp(t) + (1 - beta) * math.exp(s))
            for s, t in zip(student, teacher, strict=True)
        ]
        return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)

    return of


CASES: list[tuple[str, dict[str, float], Callable[[list[float], list[float]], float]]] = [
    ("forward_kl", {}, lambda student, teacher: kl(teacher, student)),
    ("reverse_kl", {}, kl),
    ("jsd", {}, jsd(0.5)),
    ("jsd", {"beta": 0.1}, jsd(0.1)),
]


@pytest.mark.parametrize(("name", "options", "by_hand"), CASES)
def test_value_and_gradient_are_those_of_the_formula(
    name: str, options: dict[str, float], by_hand: Callable[[list[float], list[float]], float]
) -> None:
    loss = LOSSES[name]
    student = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
    inputs = {
        "student_distribution": student,
        "teacher_distribution": torch.tensor(TEACHER, dtype=torch.float64),
    }
    options = loss.with_defaults(name, options, field="loss.options")  # type: ignore[assignment]
    values = loss(inputs, options).values
    expected = [by_hand(own, other) for own, other in zip(STUDENT, TEACHER, strict=True)]
    assert values.tolist() == pytest.approx(expected, rel=1e-9)
    values.sum().backward()
    assert student.grad is not None
    for at, row in enumerate(STUDENT):
        for token in range(len(row)):
            step = 1e-5
            sides = [
                by_hand([*row[:token], row[token] + side, *row[token + 1 :]], TEACHER[at])
                for side in (step, -step)
            ]
            slope = (sides[0] - sides[1]) / (2 * step)
            assert float(student.grad[at, token]) == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("name", "options", "by_hand"), CASES)
def test_equal_distributions_have_no_divergence(
    name: str, options: dict[str, float], by_hand: Callable[[list[float], list[float]], float]
) -> None:
    loss = LOSSES[name]
    own = torch.tensor(STUDENT, dtype=torch.float64)
    options = loss.with_defaults(name, options, field="loss.options")  # type: ignore[assignment]
    inputs = {"student_distribution": own, "teacher_distribution": own}
    assert loss(inputs, options).values.abs().max() < 1e-12
