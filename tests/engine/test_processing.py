"""Processed logprobs: those of the sampled distribution, and the same values when scored again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.exact import sample_logprobs
from lockstep.engine.processing import LogitsRow, TokenCounts, process
from lockstep.tokens import Sampling, Shaping
from tests.engine import checkpoints
from tests.engine.rig import Rig, ids, sample_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 5, "temperature": 1.3},
    {"min_p": 0.05},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.7, "temperature": 0.8},
    {"repetition_penalty": 1.3},
    {"logit_bias": {3: 4.0, 90: -7.5}, "temperature": 0.9},
    {"allowed_token_ids": tuple(range(0, 400, 3))},
    {"min_tokens": 4, "ignore_eos": False, "stop_token_ids": (5, 7, 300)},
    {
        "temperature": 1.4, "top_p": 0.9, "top_k": 60, "min_p": 0.01, "presence_penalty": -0.3,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {8: 1.0},
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def rig(tiny: Path) -> Rig:
    return Rig(tiny, logprob_mode="processed", max_batch_tokens=64)


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F71")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_trainer_scores_processed_logprobs_again_bit_for_bit(
    rig: Rig, options: dict[str, Any]
) -> None:
    completion = rig.generate(ids(31, 90), max_tokens=30, **options)
    assert completion.logprob_mode == "processed"
    sample = sample_of(completion)
    with torch.no_grad():
        (again,) = sample_logprobs(checkpoints.trainer(rig.directory), [sample])
    assert again[-len(completion.token_ids) :].tolist() == completion.logprobs


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F71")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_engine_scores_processed_logprobs_again_bit_for_bit(
    rig: Rig, options: dict[str, Any]
) -> None:
    prompt = ids(32, 75)
    completion = rig.generate(prompt, max_tokens=25, **options)
    whole = prompt + completion.token_ids
    scored = rig.generate(
        whole, **options, max_tokens=4, prompt_logprobs=0, score_start=len(prompt)
    ).prompt_logprobs
    assert scored is not None
    assert [one.logprob for one in scored[len(prompt) :] if one] == completion.logprobs


@pytest.mark.exact_arithmetic
def test_raw_logprobs_ignore_all_options(rig: Rig) -> None:
    completion = rig.generate(ids(33, 40), logprob_mode="raw", **OPTIONS[-1])
    whole = [*completion.prompt_ids, *completion.token_ids]
    assert completion.logprobs == checkpoints.reference(rig.directory, whole)[-8:]


@pytest.mark.exact_arithmetic
def test_gradients_flow_through_every_option(rig: Rig) -> None:
    completion = rig.generate(ids(34, 40), max_tokens=12, **OPTIONS[-1])
    model = checkpoints.trainer(rig.directory)
    (again,) = sample_logprobs(model, [sample_of(completion)])
    (-again[-12:].mean()).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    assert gradients
    assert all(bool(torch.isfinite(each).all()) for each in gradients)


def test_a_token_that_cannot_be_drawn_has_logprob_minus_infinity(rig: Rig) -> None:
    prompt = ids(35, 30)
    (likely,) = rig.generate(prompt, temperature=0, max_tokens=1).token_ids
    other = (likely + 1) % 500
    scored = rig.generate(
        [*prompt, other, likely], top_k=1, max_tokens=1, prompt_logprobs=0, score_start=30
    ).prompt_logprobs
    assert scored is not None
    entry = scored[30]
    assert entry is not None
    assert entry.logprob == -math.inf


def test_penalties_are_those_of_openai_and_of_the_repetition_paper() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    counts = TokenCounts([1], 4, logits.device)
    counts.add(0)
    counts.add(0)
    options = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    (row,) = process(logits, [LogitsRow(options, 1.0, (), counts)])
    # Token 0 came twice, token 1 is in the prompt only, the others nowhere.
    assert row.tolist() == [2.0 / 2 - 2 * 0.25 - 0.5, -1.0 * 2, 0.5, 3.0]


def test_neighbours_of_a_row_with_options_keep_their_bits() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    plain = LogitsRow(Shaping(), 1.0)
    hot = LogitsRow(Shaping(top_k=3, logit_bias={4: 2.0}), 0.5)
    mixed = process(logits, [plain, hot, plain, plain, hot, plain])
    assert torch.equal(mixed[[0, 2, 3, 5]], logits[[0, 2, 3, 5]])
    assert torch.equal(mixed[[1, 4]], process(logits[[1, 4]], [hot, hot]))
    assert process(logits, [plain] * 6) is logits, "nothing is copied where nothing is asked for"


@pytest.mark.parametrize("options", [{"frequency_penalty": 2.0}, {"repetition_penalty": 1.5}])
def test_penalties_count_each_choice_for_itself_and_survive_new_weights(
    rig: Rig, options: dict[str, Any]
) -> None:
    alone = [rig.generate(ids(36, 30), seed=9 + at, **options) for at in range(2)]
    both = rig.submit(ids(36, 30), seed=9, n=2, **options)
    rig.run(4)
    rig.core.commit(rig.core.served.weights)
    rig.run()
    assert [each.token_ids for each in both.completions] == [each.token_ids for each in alone]


def test_the_completion_names_the_options_that_shaped_it(rig: Rig) -> None:
    assert rig.generate(ids(37, 10), temperature=0.5).shaping is None
    shaped = rig.generate(ids(37, 10), top_p=0.9, min_tokens=2, ignore_eos=False)
    ends = tuple(sorted(rig.core.config.eos_ids))
    assert shaped.shaping == Shaping(top_p=0.9, min_tokens=2, end_ids=ends)
