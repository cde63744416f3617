"""The engine records the set that each token was drawn from, and scoring replays it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.engine.exact import sample_logprobs
from lockstep.engine.processing import HIDDEN, process_spans
from lockstep.tokens import ShapedSpan, Shaping, Support
from lockstep.tokens.support import support_row
from tests.engine import checkpoints
from tests.engine.rig import Rig, ids, sample_of
from tests.engine.test_processing import OPTIONS

RESTRICTED = [
    options
    for options in OPTIONS
    if {"top_p", "top_k", "min_p", "allowed_token_ids", "min_tokens"} & set(options)
]


@pytest.fixture(scope="module")
def rig(tiny: Path) -> Rig:
    return Rig(tiny, logprob_mode="processed", max_batch_tokens=64)


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F100")
@pytest.mark.parametrize("options", RESTRICTED, ids=str)
def test_logprobs_over_the_recorded_support_are_those_of_the_engine(
    rig: Rig, options: dict[str, Any]
) -> None:
    plain = rig.generate(ids(41, 60), max_tokens=30, **options)
    completion = rig.generate(ids(41, 60), max_tokens=30, support=True, **options)
    assert (completion.token_ids, completion.logprobs) == (plain.token_ids, plain.logprobs)
    assert plain.support is None
    assert completion.support is not None
    model = checkpoints.trainer(rig.directory)
    with torch.no_grad():
        (again,) = sample_logprobs(model, [sample_of(completion)])
        logits = model(torch.tensor([sample_of(completion).token_ids])).logits[0, :-1]
    assert again[-30:].tolist() == completion.logprobs
    # The sets that the options select from these logits are the recorded ones.
    sample = sample_of(plain)
    shaped = process_spans(
        logits.float(), sample.token_ids, sample.shaping, plain.temperature
    )[-30:]  # fmt: skip
    assert (completion.support.keep(shaped.shape[-1]) == (shaped > HIDDEN).numpy()).all()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"presence_penalty": 0.5}])
def test_no_support_is_recorded_where_every_token_can_be_drawn(
    rig: Rig, options: dict[str, Any]
) -> None:
    assert rig.generate(ids(42, 20), support=True, **options).support is None


def test_choices_and_aborts_keep_the_supports_of_their_tokens(rig: Rig) -> None:
    both = rig.submit(ids(43, 20), n=2, support=True, top_k=7)
    rig.run(4)
    rig.core.abort(both.handle.request.request_id)
    for completion in both.completions:
        assert completion.support is not None
        assert completion.support.rows == len(completion.token_ids) > 0
        assert (completion.support.sizes() >= 7).all()


VOCAB = 6


def enumerated(logits: Tensor, support: bool, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for every pair of tokens, its probability under old weights, and the ratio of new to
    old probabilities: over the recorded supports, or over sets selected again.
    """
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    span = [ShapedSpan(1, 3, Shaping(top_p=top_p))]
    old, ratio, target = [], [], []
    for first, second in pairs:
        tokens = [0, first, second]
        before = torch.stack((logits[0, 0], logits[0, 1 + first]))
        after = torch.stack((logits[1, 0], logits[1, 1 + first]))
        shaped = process_spans(before, tokens, span, 1.0)
        recorded = None
        if support and shaped[0, first] > HIDDEN and shaped[1, second] > HIDDEN:
            rows = [support_row((row > HIDDEN).numpy()) for row in shaped]
            recorded = Support.join([Support.unrecorded(1, VOCAB), Support.of_rows(rows, VOCAB)])
        replayed = process_spans(after, tokens, span, 1.0, support=recorded)
        chosen = torch.tensor([first, second])[:, None]
        was = torch.log_softmax(shaped, -1).gather(-1, chosen).sum()
        now = torch.log_softmax(replayed, -1).gather(-1, chosen).sum()
        within = after.masked_fill(shaped == HIDDEN, HIDDEN)
        old.append(was.exp())
        ratio.append((now - was).exp() if was > -math.inf else torch.zeros(()))
        target.append(torch.log_softmax(within, -1).gather(-1, chosen).sum().exp())
    return torch.stack(old), torch.stack(ratio), torch.stack(target)


@pytest.mark.failure_mode("F100")
@pytest.mark.parametrize("top_p", [0.6, 0.8, 0.9])
def test_ratios_over_the_recorded_support_are_unbiased(top_p: float) -> None:
    """All sequences of two tokens, under old weights and new ones: the expectation of ratio x
    reward under the old policy is the reward of the new policy within the recorded supports.
    """
    draw = torch.Generator().manual_seed(3)
    bases = torch.randn(1 + VOCAB, VOCAB, generator=draw, dtype=torch.float64)
    moved = bases + 0.9 * torch.randn(1 + VOCAB, VOCAB, generator=draw, dtype=torch.float64)
    logits, reward = torch.stack((bases, moved)), torch.rand(VOCAB**2, generator=draw).double()
    old, ratio, target = enumerated(logits, True, top_p)
    assert float(old.sum()) == pytest.approx(1, abs=1e-12)
    assert float((old * ratio).sum()) == pytest.approx(1, abs=1e-12)
    assert float((old * ratio * reward).sum()) == pytest.approx(
        float((target * reward).sum()), abs=1e-12
    )
    _, again, _ = enumerated(logits, False, top_p)
    assert abs(float((old * again).sum()) - 1) > 0.02, "selecting again is biased"


def test_rows_of_different_forms_are_replayed(rig: Rig) -> None:
    """Ids, a bitmap, missing ids and the whole vocabulary."""
    vocab, shaping = 96, Shaping(top_p=0.5, frequency_penalty=0.5)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(5))
    masks = np.zeros((4, vocab), dtype=bool)
    for row, count in enumerate((2, 48, 94, 96)):
        masks[row, :count] = True
    rows = Support.of_rows([support_row(mask) for mask in masks], vocab)
    support = Support.join([Support.unrecorded(1, vocab), rows])
    tokens = [7, 1, 1, 0, 1]
    shaped = process_spans(logits, tokens, [ShapedSpan(1, 5, shaping)], 0.5, support=support)
    penalties = Shaping(frequency_penalty=0.5)
    expected = process_spans(logits, tokens, [ShapedSpan(1, 5, penalties)], 0.5)
    assert torch.equal(shaped, expected.masked_fill(~torch.from_numpy(masks), HIDDEN))
