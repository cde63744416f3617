"""Corrections and denominators against their definitions, computed token by token in float64."""

from __future__ import annotations

import math
import random
from itertools import accumulate, pairwise

import pytest
import torch

from lockstep.train.losses.corrections import DEFAULT_RANGES, Correction, correct
from lockstep.train.losses.denominator import Denominator
from lockstep.train.losses.loss import Aggregation

LENGTHS = [1, 4, 7, 3]
EDGES = list(pairwise([0, *accumulate(LENGTHS)]))
DRAWS = random.Random(7)
LOG_RHO = [DRAWS.gauss(0, 0.6) for _ in range(sum(LENGTHS))]
LEARN = [DRAWS.random() < 0.8 for _ in range(sum(LENGTHS) - 3)] + [False] * 3
"""The last sequence has no token that counts."""


def rho_by_hand(level: str) -> list[float]:
    rhos = []
    for start, end in EDGES:
        own = [LOG_RHO[at] for at in range(start, end) if LEARN[at]]
        for at in range(start, end):
            if level == "token":
                rhos.append(math.exp(LOG_RHO[at]) if LEARN[at] else 1.0)
            else:
                rhos.append(math.exp(sum(own) / (max(len(own), 1) if level == "geometric" else 1)))
    return rhos


@pytest.mark.failure_mode("F101")
@pytest.mark.parametrize(("kind", "level"), DEFAULT_RANGES)
def test_a_correction_is_that_of_its_definition(kind: str, level: str) -> None:
    low, high = (0.8, 1.25) if level != "geometric" else (0.95, 1.05)
    own = Correction(kind, level, low, high)  # type: ignore[arg-type]
    learn = torch.tensor(LEARN)
    done = correct(torch.tensor(LOG_RHO, dtype=torch.float64), learn, LENGTHS, [own])
    rhos = rho_by_hand(level)
    inside = [low <= rho <= high for rho in rhos]
    limited = [min(max(rho, low), high) for rho in rhos]
    assert done.touched_N[f"{level}_{kind}"].tolist() == [
        counts and not fits for counts, fits in zip(LEARN, inside, strict=True)
    ]
    assert any(done.touched_N[own.name].tolist())
    if kind == "tis":
        assert done.keep_N.tolist() == LEARN
    else:
        assert done.keep_N.tolist() == [a and b for a, b in zip(LEARN, inside, strict=True)]
    expected = [1.0] * len(rhos) if kind == "mask" else limited
    assert done.weight_N.tolist() == pytest.approx(expected, rel=1e-9, abs=0)


def test_corrections_compose() -> None:
    log_rho, learn = torch.tensor(LOG_RHO, dtype=torch.float64), torch.tensor(LEARN)
    weight, mask = Correction("tis", "token", 0, 1.1), Correction("mask", "geometric", 0.9, 1.1)
    both = correct(log_rho, learn, LENGTHS, [weight, mask])
    alone = [correct(log_rho, learn, LENGTHS, [own]) for own in (weight, mask)]
    assert torch.equal(both.weight_N, alone[0].weight_N)
    assert torch.equal(both.keep_N, alone[1].keep_N)
    assert both.touched_N.keys() == {"token_tis", "geometric_mask"}


def test_an_enormous_ratio_is_limited_and_not_infinite() -> None:
    own = Correction("tis", "sequence", 0.0, 2.0)
    log_rho = torch.tensor([400.0, 400.0], dtype=torch.float64)
    done = correct(log_rho, torch.tensor([True, True]), [2], [own])
    assert done.weight_N.tolist() == [2.0, 2.0]


@pytest.mark.failure_mode("F101")
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_an_aggregation_is_that_of_its_definition(aggregation: Aggregation) -> None:
    values = [DRAWS.gauss(0, 1) for _ in LOG_RHO]
    rows = [[values[at] for at in range(*edge) if LEARN[at]] for edge in EDGES]
    rows = [row for row in rows if row]
    by_hand = {
        "token": sum(map(sum, rows)) / sum(map(len, rows)),
        "sequence": sum(sum(row) / len(row) for row in rows) / len(rows),
        "constant": sum(map(sum, rows)) / (len(rows) * 20),
    }
    own = Denominator(aggregation, 20)
    learn = torch.tensor(LEARN)
    counts = [sum(LEARN[at] for at in range(*edge)) for edge in EDGES]
    total = (torch.tensor(values).double() * learn * own.shares(learn, LENGTHS)).sum()
    assert float(total) / own.count(counts) == pytest.approx(by_hand[aggregation], rel=1e-6)
