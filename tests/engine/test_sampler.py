"""The sampler: the right distribution and support, with one random number per row."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.engine.sampler import SamplingRow, _draw, sample, top_logprobs, uniform
from lockstep.tokens import LogprobMode, Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -20.0])
DRAWS = 4000


def row(at: int = 0, mode: LogprobMode = "raw", **options: Any) -> SamplingRow:
    return SamplingRow(Sampling(**options), mode, uniform(1, at))


def draws(logits: Tensor, **options: Any) -> list[int]:
    rows = [row(at, **options) for at in range(DRAWS)]
    return [s.token_id for s in sample(logits.repeat(DRAWS, 1), rows)]


def chi_square(drawn: Counter[int], expected: dict[int, float]) -> float:
    return sum(
        (drawn[token] - DRAWS * p) ** 2 / (DRAWS * p) for token, p in expected.items() if p > 1e-3
    )


def normalised(weights: dict[int, float]) -> dict[int, float]:
    return {token: w / sum(weights.values()) for token, w in weights.items()}


def tempered(temperature: float, tokens: range | list[int] = range(8)) -> dict[int, float]:
    return normalised({t: math.exp(float(LOGITS[t]) / temperature) for t in tokens})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, tempered(1.0)),
        ({"temperature": 0.5}, tempered(0.5)),
        ({"temperature": 2.0}, tempered(2.0)),
        ({"top_k": 3}, tempered(1.0, [0, 6, 1])),
        ({"top_p": 0.5}, tempered(1.0, [0, 6])),
        ({"min_p": 0.3}, tempered(1.0, [0, 6, 1])),
        ({"top_k": 4, "top_p": 0.7, "min_p": 0.1}, tempered(1.0, [0, 6])),
        ({"allowed_token_ids": (3, 5)}, tempered(1.0, [3, 5])),
        ({"logit_bias": {0: -100.0, 7: 22.0}, "top_k": 2}, normalised({7: math.e**0.5, 6: 1.0})),
    ],
)
def test_draws_follow_the_requested_distribution(
    options: dict[str, Any], expected: dict[int, float]
) -> None:
    drawn = Counter(draws(LOGITS, **options))
    assert set(drawn) <= set(expected)
    assert {token for token, p in expected.items() if p > 0.01} <= set(drawn)
    # 7 degrees of freedom at most: 24.3 is the 0.1 % point.
    assert chi_square(drawn, expected) < 24.3


def test_bias_is_added_before_the_temperature() -> None:
    (drawn,) = sample(
        LOGITS[None], [row(temperature=0.5, logit_bias={5: 6.0}, logprobs=8, mode="processed")]
    )
    biased = LOGITS.clone()
    biased[5] += 6.0
    expected = torch.log_softmax(biased / 0.5, dim=-1)
    assert {t.token_id: t.logprob for t in drawn.top} == pytest.approx(
        dict(enumerate(expected.tolist())), abs=1e-5
    )


def test_temperature_zero_selects_the_most_likely_allowed_token() -> None:
    def greedy(**options: Any) -> int:
        return sample(LOGITS[None], [row(temperature=0, **options)])[0].token_id

    assert greedy() == 0
    assert greedy(allowed_token_ids=(4, 3, 5)) == 3
    assert greedy(logit_bias={4: 50.0}) == 4
    assert (
        sample(LOGITS[None], [SamplingRow(Sampling(temperature=0), "raw", 0.9, (0,))])[0].token_id
        == 6
    )


def test_raw_logprobs_ignore_the_options_and_processed_ones_obey_them() -> None:
    options = {"temperature": 0.5, "top_k": 3, "logit_bias": {2: 1.0}, "logprobs": 5}
    raw, processed = sample(LOGITS.repeat(2, 1), [row(**options), row(mode="processed", **options)])
    assert raw.token_id == processed.token_id
    plain = torch.log_softmax(LOGITS, dim=-1)
    assert raw.logprob == float(plain[raw.token_id])
    assert [t.token_id for t in raw.top] == [0, 6, 1, 2, 3]
    assert sum(math.exp(t.logprob) for t in processed.top) == pytest.approx(1)
    assert processed.logprob > raw.logprob


def test_alternatives_that_cannot_be_drawn_are_not_listed() -> None:
    (drawn,) = sample(LOGITS[None], [row(top_k=3, logprobs=8, mode="processed")])
    assert [t.token_id for t in drawn.top] == [0, 6, 1]
    assert all(math.isfinite(t.logprob) for t in drawn.top)


def test_ranks_count_from_one_and_agree_with_the_alternatives() -> None:
    order = LOGITS.argsort(descending=True).tolist()
    for token in range(8):
        (drawn,) = sample(LOGITS[None], [row(allowed_token_ids=(token,), logprobs=8)])
        assert (drawn.token_id, drawn.rank) == (token, order.index(token) + 1)
        assert [(t.token_id, t.rank) for t in drawn.top] == list(zip(order, range(1, 9)))  # noqa: B905


def test_each_row_gets_the_requested_number_of_alternatives() -> None:
    tops = top_logprobs(LOGITS.repeat(3, 1), [0, 2, 20])
    assert [len(top) for top in tops] == [0, 2, 8]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = [row(3), row(4, temperature=0), row(5, top_p=0.5), row(6, mode="processed", top_k=2)]
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(4)]


def test_a_broken_row_does_not_break_its_neighbours() -> None:
    logits = torch.stack((torch.full((8,), math.nan), LOGITS, torch.full((8,), -math.inf)))
    drawn = sample(logits, [row(1), row(1), row(1)])
    assert drawn[1] == sample(LOGITS[None], [row(1)])[0]
    assert math.isnan(drawn[0].logprob)
    assert math.isnan(drawn[2].logprob)


def test_options_that_push_a_row_out_of_range_give_no_logprob() -> None:
    """The raw logprob would be finite, for a token drawn from no distribution."""
    (drawn,) = sample(1e36 * LOGITS[None], [row(1, temperature=1e-4)])
    assert math.isnan(drawn.logprob)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(
        st.one_of(st.just(-math.inf), st.floats(-60, 60, width=32)), min_size=1, max_size=40
    ).filter(lambda values: max(values) > -math.inf),
    uniforms=st.lists(
        st.one_of(st.sampled_from([0.0, 1 - 2.0**-24]), st.floats(0, 1, exclude_max=True)),
        min_size=1, max_size=8,
    ),
)  # fmt: skip
def test_a_token_without_probability_is_never_drawn(
    logits: list[float], uniforms: list[float]
) -> None:
    shaped = torch.tensor(logits).repeat(len(uniforms), 1)
    drawn, sound = _draw(shaped, uniforms)
    assert bool(sound.all())
    assert bool((torch.softmax(shaped, dim=-1).gather(-1, drawn[:, None]) > 0).all())


def test_the_ends_of_the_unit_interval_hit_tokens_with_mass() -> None:
    shaped = torch.tensor([-math.inf, -math.inf, 0.0, 1.0, -math.inf, -math.inf]).repeat(2, 1)
    assert _draw(shaped, [0.0, 1 - 2.0**-24])[0].tolist() == [2, 3]


def test_uniforms_lie_in_the_unit_interval_and_spread() -> None:
    values = [uniform(seed, at) for seed in range(-50, 50) for at in range(100)]
    assert min(values) >= 0
    assert max(values) < 1
    assert len(set(values)) > 9_990
    tenths = Counter(int(10 * value) for value in values)
    assert all(850 < tenths[i] < 1150 for i in range(10))
    assert uniform(2**63 - 1, 3) != uniform(-(2**63), 3)
