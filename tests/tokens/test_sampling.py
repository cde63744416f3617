"""Sampling: a value that makes no sense is refused by the name of its field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, 1e-5, math.nan, math.inf)],
        *[("top_p", v) for v in (0.0, 1e-9, 1.01, -1.0, math.nan)],
        ("top_k", -1),
        *[("min_p", v) for v in (-0.1, 1.1, math.nan)],
        *[("seed", v) for v in (2**63, -(2**63) - 1)],
        *[("max_tokens", v) for v in (0, -1)],
        ("min_tokens", -1),
        *[("n", v) for v in (0, -1, 1025)],
        *[("logprobs", v) for v in (-1, 101)],
        *[("prompt_logprobs", v) for v in (-1, 101)],
        ("logprob_mode", "cooked"),
        *[("presence_penalty", v) for v in (2.1, -2.1, math.nan)],
        *[("frequency_penalty", v) for v in (2.1, -2.1, math.nan)],
        *[("repetition_penalty", v) for v in (0.0, -1.0, math.inf, math.nan)],
        *[("stop", v) for v in (("",), ("x",) * 65)],
        ("score_start", -1),
        ("allowed_token_ids", ()),
        *[("logit_bias", {3: v}) for v in (101.0, -101.0, math.nan, math.inf)],
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field) as refused:
        Sampling(**{field: value})
    assert refused.value.param == field
    assert refused.value.status == 400


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(BadRequest, match="at most max_tokens"):
        Sampling(min_tokens=5, max_tokens=4)
    Sampling(min_tokens=4, max_tokens=4)
    Sampling(min_tokens=5)


def test_the_edges_of_what_makes_sense_are_accepted() -> None:
    Sampling(
        temperature=0, top_p=1e-6, top_k=0, min_p=1.0, seed=-(2**63), max_tokens=1, n=1024,
        logprobs=20, prompt_logprobs=0, logprob_mode="processed", allowed_token_ids=(0,),
        logit_bias={0: -100.0},
    )  # fmt: skip


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sampling().temperature = 2.0  # type: ignore[misc]
