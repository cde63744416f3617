"""Every loss of the table: value and gradient against plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.tokens.errors import BadRequest
from lockstep.train.losses.loss import Loss, TokenLoss
from lockstep.train.losses.loss_table import LOSSES

OLD = torch.tensor([0.0, -1.0, -0.5, -2.0, -1.5])
A = torch.tensor([0.0, 1.0, -1.0, 2.0, -0.5])
W = torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0])
SEQUENCE = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
INPUTS: dict[str, Any] = {
    "weights": W,
    "old_logprobs": OLD,
    "advantages": A,
    "token_mask": A != 0,
    "sequence_ratio_mask": SEQUENCE,
    "lengths": [5],
}
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
OPTIONS: dict[str, dict[str, float]] = {"dro": {"beta": 0.1}, "gspo": CLIP}


def trainer_logprobs() -> torch.Tensor:
    return torch.tensor([-9.0, -0.4, -0.6, -2.1, -0.2], requires_grad=True)


def plain_grpo(lp: torch.Tensor) -> torch.Tensor:
    r, moved = torch.exp(lp - OLD), lp.exp() - OLD.exp()
    cut = torch.where(A > 0, moved > 0.2, moved < -0.2)
    return (-(~cut * A * r) + 1e-3 * (lp - OLD) ** 2)[A != 0].sum()


def plain_gspo(lp: torch.Tensor) -> torch.Tensor:
    mean = ((lp - OLD) * SEQUENCE).sum().detach() / SEQUENCE.sum()
    s = torch.exp(mean + lp - lp.detach())
    return -torch.min(s * A, torch.clamp(s, 0.8, 1.2) * A).sum()


def plain_ppo(lp: torch.Tensor) -> torch.Tensor:
    r = torch.exp(lp - OLD)
    return -torch.min(r * A, torch.clamp(r, 0.8, 1.2) * A).sum()


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grpo": plain_grpo,
    "distill": plain_grpo,
    "cross_entropy": lambda lp: -(W * lp).sum(),
    "importance_sampling": lambda lp: -(torch.exp(lp - OLD) * A).sum(),
    "ppo": plain_ppo,
    "cispo": lambda lp: -(torch.clamp(torch.exp(lp - OLD), 0, 4).detach() * lp * A).sum(),
    "dro": lambda lp: -(lp * A - 0.5 * 0.1 * (lp - OLD) ** 2).sum(),
    "gspo": plain_gspo,
}


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_plain_torch(name: str) -> None:
    loss = LOSSES[name]
    options = loss.with_defaults(name, OPTIONS.get(name, {}), field="loss.options")
    own = trainer_logprobs()
    value = loss({**INPUTS, "logprobs": own}, options).values.sum()
    value.backward()
    other = trainer_logprobs().detach().double().requires_grad_()
    expected = PLAIN[name](other)
    expected.backward()
    torch.testing.assert_close(value.double(), expected)
    torch.testing.assert_close(own.grad.double(), other.grad)
    assert bool(own.grad.abs().sum() > 0)


@pytest.mark.parametrize("name", LOSSES)
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
    with pytest.raises(BadRequest, match=r"o\.mask is 1\.0: expected a text"):
        LOSSES["grpo"].with_defaults("grpo", {"mask": 1.0}, field="o")


def test_a_loss_that_takes_an_unknown_input_is_a_programming_error() -> None:
    def odd(logprobs: torch.Tensor, rewards: torch.Tensor) -> TokenLoss:
        return TokenLoss(logprobs * rewards)

    with pytest.raises(TypeError, match="odd takes 'rewards': the inputs of losses are logprobs"):
        Loss.of(odd)
