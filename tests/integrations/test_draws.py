"""Rows are scored over the sets that their tokens were drawn from, found by the tokens alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.engine import exact
from lockstep.integrations.draws import DrawnRows, check_recorded, support_of
from lockstep.integrations.trl.exact_head import pack_batch
from lockstep.integrations.trl.rollout_worker import check_unshaped
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadSupport
from lockstep.tokens.support import Support
from tests.train.rollouts import directory, sampled

pytestmark = [pytest.mark.exact_arithmetic, pytest.mark.failure_mode("F100")]
OPTIONS = {"top_p": 0.9, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return sampled(support=True, **OPTIONS)


def padded(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and labels of rows as TRL makes them, padded on both sides."""
    width = max(len(own.token_ids) for own in samples) + 2
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for at, own in enumerate(samples):
        row = slice(1, 1 + len(own.token_ids))
        ids[at, row], mask[at, row] = torch.tensor(own.token_ids), 1
        start = own.sampled_mask.index(True)
        labels[at, 1 + start : row.stop] = torch.tensor(own.token_ids[start:])
    return ids, mask, labels


def score(samples: list[Sample], draws: DrawnRows, *, prepared: bool = True) -> list[list[float]]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory("tiny"), dtype=torch.float32)
    if prepared:
        exact.prepare(model)
    ids, mask, labels = padded(samples)
    packed = pack_batch(model, ids, mask, labels)
    assert packed is not None
    with torch.no_grad():
        logprobs, entropy = packed.score(model, labels, 1.0, draws)
    assert bool(torch.isfinite(entropy).all())
    return [row[label[1:] != -100].tolist() for row, label in zip(logprobs, labels, strict=True)]


def drawn_logprobs(own: Sample) -> list[float]:
    pairs = zip(own.logprobs, own.sampled_mask, strict=True)
    return [value for value, was in pairs if was]


def test_rows_have_the_logprobs_that_they_were_sampled_with(samples: list[Sample]) -> None:
    draws = DrawnRows()
    for own in samples:
        draws.add(own)
    assert score(samples, draws) == [drawn_logprobs(own) for own in samples]
    close = score(samples, draws, prepared=False)
    for row, own in zip(close, samples, strict=True):
        assert row == pytest.approx(drawn_logprobs(own), abs=1e-4)
    whole = score(samples, DrawnRows())
    assert whole != close


def test_every_turn_of_a_row_is_found_by_its_prefix(samples: list[Sample]) -> None:
    draws = DrawnRows()
    draws.add(samples[0])
    (span,) = samples[0].shaping
    longer = [*samples[0].token_ids, 3, 4, 5]
    (found,) = draws.find(longer)
    assert found.span == span
    assert samples[0].support is not None
    support = support_of([found], len(longer))
    assert support is not None
    assert support.lists() == [*samples[0].support.lists(), [], [], []]
    assert draws.find(longer[: span.end - 1]) == []


def test_a_row_that_was_not_sampled_is_an_error(samples: list[Sample]) -> None:
    draws = DrawnRows()
    draws.add(samples[0])
    with pytest.raises(BadSupport, match="is not one that was sampled"):
        score(samples[:2], draws)


def test_dropped_sets_are_an_error_and_not_a_bias(samples: list[Sample]) -> None:
    draws = DrawnRows(most_bytes=samples[0].support.nbytes)  # type: ignore[union-attr]
    for own in samples:
        draws.add(own)
    with pytest.raises(BadSupport, match="were dropped"):
        draws.find(samples[0].token_ids)


def test_sets_that_were_not_recorded_are_an_error(samples: list[Sample]) -> None:
    check_recorded(samples[0])
    with pytest.raises(BadSupport, match=r"support: absent.*top_p"):
        check_recorded(replace(samples[0], support=None))


def test_the_asynchronous_trainer_rejects_shaped_tokens_by_their_options(
    samples: list[Sample],
) -> None:
    check_unshaped(replace(samples[0], shaping=(), support=None))
    with pytest.raises(BadSupport, match=r"drawn with top_p 0\.9, repetition_penalty 1\.2, but"):
        check_unshaped(samples[0])


def test_supports_are_placed_among_rows_without_one() -> None:
    assert Support.placed([], 4) is None
    own = Support.of_ids([[1, 2], [7]], 9)
    placed = Support.placed([(1, own)], 4)
    assert placed is not None
    assert placed.lists() == [[], [1, 2], [7], []]
    assert placed.recorded().tolist() == [False, True, True, False]
