"""Datums in one row: the bits of a pass with padding, and what they begin with computed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.engine import exact
from lockstep.integrations.tinker.training import passes
from lockstep.integrations.tinker.training.passes import TrainingSequence, target_logprobs
from tests.engine.rig import ids
from tests.integrations.tinker.training.test_trainer import load

PROMPT = 20


@pytest.fixture(scope="module")
def model() -> Any:
    return exact.prepare(load())


def sequence(prompt: int, answer: int, length: int, *, depth: int = 1) -> TrainingSequence:
    """An answer of so many tokens to one of the prompts, from which alone is learnt."""
    tokens = ids(prompt, PROMPT) + ids(100 + answer, length)
    targets = torch.tensor(tokens[1:])
    advantages = torch.zeros(len(tokens) - 1)
    advantages[PROMPT - 1 :] = 1.0
    if depth > 1:
        targets = torch.stack([(targets + k) % 64 for k in range(depth)], dim=-1)
        advantages = advantages[:, None].expand(targets.shape)
    return TrainingSequence(tokens[:-1], targets, {"advantages": advantages})


@pytest.mark.parametrize("depth", [1, 3])
def test_packed_datums_have_the_bits_of_padded_ones(model: Any, depth: int) -> None:
    batch = [sequence(at // 4, at, 3 + 7 * at, depth=depth) for at in range(8)]
    with torch.no_grad():
        packed = target_logprobs(model, batch, 1)
        padded = passes._padded(model, batch, exact.row_multiple_of(model))
    for own, other, item in zip(packed, padded, batch, strict=True):
        assert own.shape == item.targets.shape
        assert torch.equal(own, other)


def test_a_prompt_of_several_datums_is_computed_once(model: Any) -> None:
    batch = [sequence(0, at, 6) for at in range(8)]
    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    with torch.no_grad():
        target_logprobs(model, batch, 1)
    hook.remove()
    assert seen == [PROMPT - 1 + 8 * 6]


def test_nothing_is_shared_of_a_datum_that_is_learnt_from_as_a_whole() -> None:
    whole = sequence(0, 0, 6)
    whole.inputs["weights"] = torch.ones(len(whole.tokens))
    assert whole.beginning == 0
    nothing = TrainingSequence(whole.tokens, whole.targets, {"advantages": torch.zeros(25)})
    assert nothing.beginning == 0
