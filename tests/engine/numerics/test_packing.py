"""Packed sequences have the bits that they have alone, and gradients that add up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.engine.numerics.packing import pack
from lockstep.models import bundled

pytestmark = pytest.mark.exact_arithmetic


@pytest.fixture(scope="module", params=("tiny", "tiny-moe"))
def model(request: pytest.FixtureRequest) -> Any:
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(bundled(request.param), dtype=torch.float32)
    return exact.prepare(made)


def some(lengths: Sequence[int]) -> list[list[int]]:
    source = random.Random(7)
    return [[source.randrange(512) for _ in range(length)] for length in lengths]


def groups() -> tuple[list[list[int]], list[int]]:
    """Return responses of different lengths to few prompts, and the length of each prompt."""
    prompts = some((17, 5, 70))
    answers = some((1, 9, 40, 3, 130, 2, 12, 64))
    chosen = [prompts[at % len(prompts)] for at in range(len(answers))]
    return [p + a for p, a in zip(chosen, answers, strict=True)], list(map(len, chosen))


def test_a_shared_prompt_is_packed_once_and_changes_no_bit(model: Any) -> None:
    sequences, shared = groups()
    row = pack(sequences, shared)
    assert len(row.ids_T) == 17 + 5 + 70 + sum(map(len, sequences)) - sum(shared)
    with torch.no_grad():
        packed = model(**row.arguments()).logits[0]
        for ids, tokens in zip(sequences, row.tokens_of, strict=True):
            alone = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            assert row.ids_T[tokens].tolist() == ids
            assert torch.equal(packed[tokens], alone)


def test_padding_the_row_changes_no_bit(model: Any) -> None:
    sequences, shared = groups()
    multiple = exact.row_multiple_of(model)
    plain, padded = pack(sequences, shared), pack(sequences, shared, multiple=multiple)
    assert len(plain.ids_T) % multiple
    assert not len(padded.ids_T) % multiple
    assert [list(tokens) for tokens in padded.tokens_of] == [list(t) for t in plain.tokens_of]
    with torch.no_grad():
        short, whole = (model(**row.arguments()).logits[0] for row in (plain, padded))
    assert torch.equal(whole[: len(short)], short)


def test_the_gradient_equals_that_of_separate_sequences(model: Any) -> None:
    sequences, shared = groups()

    def gradient(logprobs: Sequence[Tensor]) -> Tensor:
        model.zero_grad()
        torch.stack([each.sum() for each in logprobs]).sum().backward()
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat(parts).clone()

    row = pack(sequences, shared)
    logits = model(**row.arguments()).logits[0]
    together = gradient(
        [
            exact.chosen_logprobs(logits[tokens[:-1]], torch.tensor(ids[1:]))
            for ids, tokens in zip(sequences, row.tokens_of, strict=True)
        ]
    )
    alone = gradient([exact.token_logprobs(model, ids) for ids in sequences])  # type: ignore[misc]
    assert float((together - alone).norm() / alone.norm()) < 1e-5


def test_packed_sequences_score_as_each_does_alone(model: Any) -> None:
    sequences = some((160, 66, 9, 1, 9, 2))
    with torch.no_grad():
        together = exact.token_logprobs(model, sequences)
        assert [len(row) for row in together] == [159, 65, 8, 0, 8, 1]
        for row, ids in zip(together, sequences, strict=True):
            assert torch.equal(row, exact.token_logprobs(model, ids))  # type: ignore[arg-type]


def test_sequences_with_similar_prefixes_are_kept_apart(model: Any) -> None:
    (one,) = some((20,))
    other = one[:10] + [(token + 1) % 512 for token in one[10:]]
    row = pack([one, other], [15, 15])
    assert len(row.ids_T) == 40
    with torch.no_grad():
        packed = model(**row.arguments()).logits[0]
        alone = model(input_ids=torch.tensor([other]), use_cache=False).logits[0]
    assert torch.equal(packed[row.tokens_of[1]], alone)
