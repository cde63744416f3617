"""Losses: value and gradient of each against plain PyTorch written from the documentation."""

from __future__ import annotations

import pytest
import torch

from lockstep.integrations.tinker.training.losses import LOSSES, loss_of
from lockstep.tokens.errors import BadRequest

Q = torch.tensor([0.0, -1.0, -0.5, -2.0, -1.5])
A = torch.tensor([0.0, 1.0, -1.0, 2.0, -0.5])
W = torch.tensor([0.0, 1.0, 0.5, 1.0, 2.0])
MASK = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
INPUTS = {"weights": W, "logprobs": Q, "advantages": A, "sequence_ratio_mask": MASK}
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def fresh() -> torch.Tensor:
    return torch.tensor([-9.0, -0.4, -0.6, -2.1, -0.2], requires_grad=True)


def plain(name: str, lp: torch.Tensor) -> torch.Tensor:
    r = torch.exp(lp - Q)
    if name == "cross_entropy":
        return -(W * lp).sum()
    if name == "importance_sampling":
        return -(r * A).sum()
    if name == "ppo":
        return -torch.min(r * A, torch.clamp(r, 0.8, 1.2) * A).sum()
    if name == "cispo":
        return -(torch.clamp(r, 0.0, 4.0).detach() * lp * A).sum()
    if name == "dro":
        return -(lp * A - 0.5 * 0.1 * (lp - Q) ** 2).sum()
    s = torch.exp(((lp - Q) * MASK).sum().detach() / MASK.sum() + lp - lp.detach())
    return -torch.min(s * A, torch.clamp(s, 0.8, 1.2) * A).sum()


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_plain_torch(name: str) -> None:
    config = {"dro": {"beta": 0.1}, "gspo": CLIP}.get(name, {})
    loss = loss_of(name)
    own, other = fresh(), fresh()
    value = loss.compute(own, INPUTS, loss.settings(name, config))
    expected = plain(name, other)
    value.backward()
    expected.backward()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(own.grad, other.grad)
    assert bool(own.grad.abs().sum() > 0)


def test_a_prompt_token_whose_ratio_overflows_does_not_spoil_the_loss() -> None:
    inputs = {"logprobs": torch.tensor([-2000.0, -1.0]), "advantages": torch.tensor([0.0, 1.0])}
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss = loss_of("importance_sampling").compute(logprobs, inputs, {})
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad.tolist() == [0.0, -1.0]


def test_settings_that_a_loss_does_not_have_or_needs_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"loss_fn_config\.beta is 1\.0: ppo takes these numbers"):
        loss_of("ppo").settings("ppo", {"beta": 1.0})
    with pytest.raises(BadRequest, match=r"dro needs the number loss_fn_config\.beta"):
        loss_of("dro").settings("dro", {})
    with pytest.raises(BadRequest, match="'custom' is not supported"):
        loss_of("custom")
    with pytest.raises(BadRequest, match="there are cross_entropy, importance_sampling, ppo"):
        loss_of("nonsense")
