"""Every loss of the table: value and gradient in float64 against formulas written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.tokens.errors import BadRequest
from lockstep.train.losses.loss import Loss, TokenLoss
from lockstep.train.losses.loss_table import LOSSES

D = torch.float64
OLD = torch.tensor([0.0, -1.0, -0.5, -2.0, -1.5], dtype=D)
NEW = [-9.0, -0.4, -0.6, -2.1, -0.2]
A = torch.tensor([0.0, 1.0, -1.0, 2.0, -0.5], dtype=D)
W = torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0], dtype=D)
SEQUENCE = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], dtype=D)
INPUTS: dict[str, Any] = {
    "weights": W,
    "old_logprobs": OLD,
    "advantages": A,
    "token_mask": A != 0,
    "sequence_ratio_mask": SEQUENCE,
    "lengths": [5],
}
OPTIONS: dict[str, dict[str, float]] = {"dro": {"beta": 0.1}}
Row = tuple[float, float, float, float]
"""New logprob, old logprob, advantage and weight of one token."""


def trainer_logprobs() -> torch.Tensor:
    return torch.tensor(NEW, dtype=D, requires_grad=True)


def clipped(low: float, high: float) -> Callable[[Row], tuple[float, float]]:
    """PPO's surrogate: its value, and its derivative by the new logprob."""

    def of(row: Row) -> tuple[float, float]:
        new, old, a, _ = row
        r = math.exp(new - old)
        inside = min(max(r, low), high)
        return (-r * a, -r * a) if r * a <= inside * a else (-inside * a, 0.0)

    return of


def bounded(is_outside: Callable[[float, float], bool]) -> Callable[[Row], tuple[float, float]]:
    """An unclipped ratio inside a trust region, and a penalty of the squared log ratio."""

    def of(row: Row) -> tuple[float, float]:
        new, old, a, _ = row
        if not a:  # tokens that do not count
            return 0.0, 0.0
        kept = not is_outside(math.exp(new) - math.exp(old), a)
        surrogate = -a * math.exp(new - old) * kept
        return surrogate + 1e-3 * (new - old) ** 2, surrogate + 2e-3 * (new - old)

    return of


def ratio(row: Row) -> tuple[float, float]:
    new, old, a, _ = row
    return -math.exp(new - old) * a, -math.exp(new - old) * a


def cispo(row: Row) -> tuple[float, float]:
    new, old, a, _ = row
    weight = min(math.exp(new - old), 4.0)
    return -weight * new * a, -weight * a


def dro(row: Row) -> tuple[float, float]:
    new, old, a, _ = row
    return -(new * a - 0.05 * (new - old) ** 2), -(a - 0.1 * (new - old))


def sequence(row: Row) -> tuple[float, float]:
    """GSPO: the sequence has one ratio, which clips all tokens or none."""
    _, _, a, _ = row
    log = sum(
        (new - old) * w for new, old, w in zip(NEW, OLD.tolist(), SEQUENCE.tolist(), strict=True)
    )
    r = math.exp(log / 4)
    inside = min(max(r, 0.9997), 1.0004)
    return (-r * a, -r * a) if r * a <= inside * a else (-inside * a, 0.0)


def dppo_outside(moved: float, a: float) -> bool:
    return moved > 0.2 if a > 0 else moved < -0.2


def weighted(row: Row) -> tuple[float, float]:
    return -row[3] * row[0], -row[3]


BY_HAND: dict[str, Callable[[Row], tuple[float, float]]] = {
    "dppo": bounded(dppo_outside),
    "distill": bounded(dppo_outside),
    "ipo": bounded(lambda moved, _: abs(moved) > 0.2),
    "grpo": clipped(0.8, 1.2),
    "dr_grpo": clipped(0.8, 1.2),
    "dapo": clipped(0.8, 1.28),
    "reinforce++": clipped(0.8, 1.2),
    "ppo": clipped(0.8, 1.2),
    "rloo": ratio,
    "importance_sampling": ratio,
    "cispo": cispo,
    "dro": dro,
    "gspo": sequence,
    "sft": weighted,
    "cross_entropy": weighted,
}


PER_TOKEN = [name for name, own in LOSSES.items() if own.learns_from != "distributions"]
"""The others are in test_distillation.py."""


@pytest.mark.parametrize("name", PER_TOKEN)
def test_value_and_gradient_are_those_of_the_formula(name: str) -> None:
    loss = LOSSES[name]
    options = loss.with_defaults(name, OPTIONS.get(name, {}), field="loss.options")
    own = trainer_logprobs()
    values = loss({**INPUTS, "logprobs": own}, options).values
    values.sum().backward()
    rows = zip(NEW, OLD.tolist(), A.tolist(), W.tolist(), strict=True)
    expected = [BY_HAND[name](row) for row in rows]
    assert own.grad is not None
    assert values.tolist() == pytest.approx([value for value, _ in expected], rel=1e-9, abs=0)
    assert own.grad.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-9, abs=0)
    assert bool(own.grad.abs().sum() > 0)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_two_sequences_at_once_have_the_losses_of_each(name: str) -> None:
    loss = LOSSES[name]
    options = loss.with_defaults(name, OPTIONS.get(name, {}), field="loss.options")
    first, second = trainer_logprobs().detach(), trainer_logprobs().detach() - 0.3
    twice = {
        key: torch.cat((value, value)) for key, value in INPUTS.items() if key != "lengths"
    } | {"logprobs": torch.cat((first, second)), "lengths": [5, 5]}
    together = loss(twice, options).values
    alone = [loss({**INPUTS, "logprobs": own}, options).values for own in (first, second)]
    assert torch.equal(together, torch.cat(alone))


def test_a_prompt_token_whose_ratio_overflows_does_not_spoil_the_loss() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    advantages = torch.tensor([0.0, 1.0])
    inputs = {
        "logprobs": logprobs,
        "old_logprobs": torch.tensor([-2000.0, -1.0]),
        "advantages": advantages,
        "token_mask": advantages != 0,
    }
    loss = LOSSES["importance_sampling"](inputs, {}).values.sum()
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad.tolist() == [0.0, -1.0]


def test_an_unknown_a_missing_and_a_mistyped_option_are_rejected_by_name() -> None:
    with pytest.raises(BadRequest, match=r"o\.beta is 1\.0: the options of ppo are clip_low_thr"):
        LOSSES["ppo"].with_defaults("ppo", {"beta": 1.0}, field="o")
    with pytest.raises(BadRequest, match=r"o\.beta is missing: dro has no default for it"):
        LOSSES["dro"].with_defaults("dro", {}, field="o")
    with pytest.raises(BadRequest, match=r"o\.clip_low_threshold is 'x': expected a number"):
        LOSSES["ppo"].with_defaults("ppo", {"clip_low_threshold": "x"}, field="o")
    with pytest.raises(BadRequest, match=r"o\.beta is -1\.0: expected 0 or more, and finite"):
        LOSSES["dro"].with_defaults("dro", {"beta": -1.0}, field="o")
    crossed = {"clip_low_threshold": 1.3}
    with pytest.raises(BadRequest, match=r"o\.clip_low_threshold is 1\.3, but o\.clip_high_thr"):
        LOSSES["ppo"].with_defaults("ppo", crossed, field="o")


def test_a_loss_that_takes_an_unknown_input_is_a_programming_error() -> None:
    def odd(logprobs: torch.Tensor, rewards: torch.Tensor) -> TokenLoss:
        return TokenLoss(logprobs * rewards)

    with pytest.raises(TypeError, match="odd takes 'rewards': the inputs of losses are logprobs"):
        Loss.of(odd)
