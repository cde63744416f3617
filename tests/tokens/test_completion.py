"""Completion: an instance that exists keeps the contract."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tokens import Completion, Ranked, RoutedExperts, VersionSpan, merge_spans
from lockstep.tokens.completion import usable
from lockstep.tokens.errors import (
    BadExperts,
    BadLogprob,
    BadVersions,
    Misaligned,
    MissingFinish,
)


def completion(**changes: Any) -> Completion:
    fields: dict[str, Any] = {
        "token_ids": [5, 6, 7],
        "logprobs": [-0.1, -0.2, 0.0],
        "prompt_ids": [1, 2],
        "finish": "stop",
        "versions": (VersionSpan("a", 0, 3),),
    }
    return Completion(**(fields | changes))


@pytest.mark.failure_mode("F06")
@pytest.mark.parametrize("logprobs", [[], [-0.1, -0.2], [-0.1] * 4])
def test_ids_and_logprobs_of_different_length_are_refused(logprobs: list[float]) -> None:
    with pytest.raises(Misaligned, match=f"3 token ids but {len(logprobs)} logprobs"):
        completion(logprobs=logprobs)


@pytest.mark.failure_mode("F06")
def test_alternatives_of_another_length_are_refused() -> None:
    with pytest.raises(Misaligned, match="3 token ids but 1 top_logprobs"):
        completion(top_logprobs=[(Ranked(1, -0.5, 1),)])


@pytest.mark.failure_mode("F15")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -9999.0, -10000.5])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_logprob_that_is_no_number_is_named_by_its_place(bad: float, at: int) -> None:
    logprobs = [-0.1, -0.2, -0.3]
    logprobs[at] = bad
    with pytest.raises(BadLogprob, match=f"position {at} is"):
        completion(logprobs=logprobs)
    kept = completion(logprobs=logprobs, allow_nonfinite=True)
    assert [usable(value) for value in kept.logprobs].index(False) == at


@pytest.mark.failure_mode("F15")
def test_infinities_that_cancel_out_are_still_found() -> None:
    with pytest.raises(BadLogprob, match="position 1 is inf"):
        completion(logprobs=[-0.1, math.inf, -math.inf])


@pytest.mark.failure_mode("F15")
def test_very_small_but_real_logprobs_are_fine() -> None:
    assert completion(logprobs=[-9998.9, -1e-30, 0.0]).logprobs == [-9998.9, -1e-30, 0.0]


@pytest.mark.failure_mode("F09")
def test_a_completion_of_no_tokens_is_valid() -> None:
    empty = completion(token_ids=[], logprobs=[], versions=(), finish="abort")
    assert not empty.complete


@pytest.mark.failure_mode("F13")
@pytest.mark.parametrize("finish", [None, "", "eos", "error"])
def test_an_answer_without_a_known_finish_is_refused(finish: str | None) -> None:
    with pytest.raises(MissingFinish, match="expected one of stop, length, tool_calls, abort"):
        completion(finish=finish)


@pytest.mark.parametrize(
    ("finish", "whole"), [("stop", True), ("tool_calls", True), ("length", False), ("abort", False)]
)
def test_only_the_models_own_ending_is_complete(finish: str, whole: bool) -> None:
    assert completion(finish=finish).complete is whole


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (VersionSpan("a", 0, 2),),
        (VersionSpan("a", 0, 4),),
        (VersionSpan("a", 1, 3),),
        (VersionSpan("a", 0, 1), VersionSpan("b", 2, 3)),
        (VersionSpan("a", 0, 2), VersionSpan("b", 1, 3)),
        (VersionSpan("a", 0, 0), VersionSpan("b", 0, 3)),
        (VersionSpan("b", 1, 3), VersionSpan("a", 0, 1)),
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(spans: tuple[VersionSpan, ...]) -> None:
    with pytest.raises(BadVersions):
        completion(versions=spans)


@given(st.lists(st.sampled_from("abc")))
def test_merged_spans_say_the_version_of_every_token(labels: list[str]) -> None:
    spans = merge_spans(labels)
    assert [span.version for span in spans for _ in range(span.start, span.end)] == labels
    assert all(a.version != b.version for a, b in pairwise(spans))
    tokens = len(labels)
    completion(token_ids=[1] * tokens, logprobs=[0.0] * tokens, versions=spans)


@pytest.mark.failure_mode("F38")
@pytest.mark.parametrize(("rows", "start", "fits"), [(4, 0, True), (2, 2, True), (0, 4, True),
                                                     (0, 9, True), (5, 0, False), (3, 0, False),
                                                     (4, 1, False)])  # fmt: skip
def test_experts_have_a_row_for_every_token_but_the_last(rows: int, start: int, fits: bool) -> None:
    experts = RoutedExperts(bytes(rows * 2), (rows, 2, 1), "uint8", start)
    if fits:
        assert completion(experts=experts).experts is experts
    else:
        with pytest.raises(BadExperts, match="a sequence of 5 tokens"):
            completion(experts=experts)
