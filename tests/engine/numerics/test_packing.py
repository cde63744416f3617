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


def groups() -> list[list[int]]:
    """Return responses of different lengths to three prompts."""
    prompts = some((17, 5, 70))
    answers = some((1, 9, 40, 3, 130, 2, 12, 64))
    chosen = [prompts[at % len(prompts)] for at in range(len(answers))]
    return [p + a for p, a in zip(chosen, answers, strict=True)]


def session() -> list[list[int]]:
    """Return the branches of a session: two sub-agents that start at different turns of the main
    line, one of which retries, and the main line before and after."""
    system, turn, first, second, retry, end = some((40, 30, 25, 9, 14, 33))
    return [
        system + turn + end, system + first, system + turn, system + turn + second,
        system + turn + second + retry, system + turn + second + end, system + first,
    ]  # fmt: skip


@pytest.mark.parametrize(("sequences", "tokens"), [
    (groups(), 17 + 5 + 70 + 1 + 9 + 40 + 3 + 130 + 2 + 12 + 64),
    (session(), 40 + 30 + 33 + 25 + 9 + 14 + 33),
], ids=["groups", "session"])  # fmt: skip
def test_what_sequences_share_is_packed_once_and_changes_no_bit(
    model: Any, sequences: list[list[int]], tokens: int
) -> None:
    row = pack(sequences)
    assert len(row.ids_T) == tokens
    assert len(pack(sequences, share=False).ids_T) == sum(map(len, sequences))
    with torch.no_grad():
        packed = model(**row.arguments()).logits[0]
        for ids, tokens in zip(sequences, row.tokens_of, strict=True):
            alone = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            assert row.ids_T[tokens].tolist() == ids
            assert torch.equal(packed[tokens], alone)


def test_padding_the_row_changes_no_bit(model: Any) -> None:
    sequences = groups()
    multiple = exact.row_multiple_of(model)
    plain, padded = pack(sequences), pack(sequences, multiple=multiple)
    assert len(plain.ids_T) % multiple
    assert not len(padded.ids_T) % multiple
    assert [list(tokens) for tokens in padded.tokens_of] == [list(t) for t in plain.tokens_of]
    with torch.no_grad():
        short, whole = (model(**row.arguments()).logits[0] for row in (plain, padded))
    assert torch.equal(whole[: len(short)], short)


@pytest.mark.parametrize("sequences", [groups(), session()], ids=["groups", "session"])
def test_the_gradient_equals_that_of_separate_sequences(
    model: Any, sequences: list[list[int]]
) -> None:
    def gradient(logprobs: Sequence[Tensor]) -> Tensor:
        model.zero_grad()
        torch.stack([each.sum() for each in logprobs]).sum().backward()
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat(parts).clone()

    row = pack(sequences)
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


def test_similar_sequences_part_where_they_differ(model: Any) -> None:
    (one,) = some((20,))
    other = one[:10] + [(token + 1) % 512 for token in one[10:]]
    row = pack([one, other])
    assert len(row.ids_T) == 30
    with torch.no_grad():
        packed = model(**row.arguments()).logits[0]
        alone = model(input_ids=torch.tensor([other]), use_cache=False).logits[0]
    assert torch.equal(packed[row.tokens_of[1]], alone)
