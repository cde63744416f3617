"""Datums of a call: packed into one row with the bits of a padded pass, and checked by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.engine import exact, forward_pass
from lockstep.engine.forward_pass import target_logprobs
from lockstep.integrations.tinker.training.datums import TrainingSequence, api_loss, batches
from lockstep.tokens.errors import BadRequest
from tests.engine.rig import ids
from tests.integrations.tinker.training.test_training_model import load

PROMPT = 20


@pytest.fixture(scope="module")
def model() -> Any:
    return exact.prepare(load())


def sequence(prompt: int, answer: int, length: int, *, depth: int = 1) -> TrainingSequence:
    """An answer of `length` tokens to one of the prompts; only the answer is learnt from."""
    tokens = ids(prompt, PROMPT) + ids(100 + answer, length)
    targets = torch.tensor(tokens[1:])
    advantages = torch.zeros(len(tokens) - 1)
    advantages[PROMPT - 1 :] = 1.0
    if depth > 1:
        targets = torch.stack([(targets + k) % 64 for k in range(depth)], dim=-1)
        advantages = advantages[:, None].expand(targets.shape)
    return TrainingSequence(tokens[:-1], targets, {"advantages": advantages})


def score(model: Any, batch: list[TrainingSequence], multiple: int) -> list[torch.Tensor]:
    with torch.no_grad():
        return target_logprobs(
            model,
            [item.tokens for item in batch],
            [item.targets for item in batch],
            multiple=multiple,
        )


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("depth", [1, 3])
def test_packed_datums_have_the_bits_of_padded_ones(
    model: Any, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = [sequence(at // 4, at, 3 + 7 * at, depth=depth) for at in range(8)]
    packed = score(model, batch, 1)
    monkeypatch.setattr(forward_pass, "packs", lambda _: False)
    padded = score(model, batch, exact.row_multiple_of(model))
    for own, other, item in zip(packed, padded, batch, strict=True):
        assert own.shape == item.targets.shape
        assert torch.equal(own, other)


@pytest.mark.exact_arithmetic
def test_a_prompt_of_several_datums_is_computed_once(model: Any) -> None:
    batch = [sequence(0, at, 6) for at in range(8)]
    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    score(model, batch, 1)
    hook.remove()
    assert seen == [PROMPT + 8 * 5]


def test_a_pass_has_at_most_64_datums_and_16384_padded_tokens() -> None:
    short = [sequence(0, at, 6) for at in range(70)]
    assert [len(batch) for batch in batches(short)] == [64, 6]
    long = [sequence(0, 0, 6000) for _ in range(3)]
    assert [len(batch) for batch in batches(long)] == [2, 1]


def test_an_unknown_loss_is_rejected_with_the_names_of_the_others() -> None:
    with pytest.raises(BadRequest, match="'custom' is not supported: it needs an uploaded graph"):
        api_loss("custom")
    with pytest.raises(BadRequest, match="expected one of dppo, ipo, grpo, dr_grpo, dapo, rloo"):
        api_loss("nonsense")
    with pytest.raises(BadRequest, match="'distill' is not supported"):
        api_loss("distill")
