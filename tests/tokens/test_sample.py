"""Sample: what a trainer gets, and what it never gets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tokens import (
    RoutedExperts,
    Sample,
    ShapedSpan,
    Shaping,
    Support,
    VersionSpan,
    merge_spans,
)
from lockstep.tokens.errors import BadExperts, BadLogprob, BadSupport, BadVersions, Misaligned


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "token_ids": [1, 2, 3, 4],
        "sampled_mask": [False, True, True, False],
        "logprobs": [0.0, -0.5, -1.5, 0.0],
        "versions": (VersionSpan("a", 1, 3),),
    }
    return Sample(**(fields | changes))


@pytest.mark.failure_mode("F06")
@pytest.mark.parametrize(
    "changes", [{"sampled_mask": [True]}, {"logprobs": [0.0] * 5}, {"token_ids": [1]}]
)
def test_arrays_of_different_length_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Misaligned):
        sample(**changes)


@pytest.mark.parametrize("logprob", [-0.5, math.nan])
def test_a_logprob_where_nothing_was_sampled_is_refused(logprob: float) -> None:
    with pytest.raises(BadLogprob, match=r"position 3 is .*, but it was not sampled"):
        sample(logprobs=[0.0, -0.5, -1.5, logprob])


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (VersionSpan("a", 1, 2),),
        (VersionSpan("a", 1, 4),),
        (VersionSpan("a", 0, 3),),
        (VersionSpan("a", 1, 3), VersionSpan("b", 2, 3)),
        (VersionSpan("a", 1, 9),),
        (VersionSpan("a", 3, 1),),
    ],
)
def test_spans_that_do_not_cover_exactly_what_was_sampled_are_refused(
    spans: tuple[VersionSpan, ...],
) -> None:
    with pytest.raises(BadVersions):
        sample(versions=spans)


@pytest.mark.failure_mode("F38")
def test_experts_must_fit_the_sequence() -> None:
    fits = RoutedExperts(bytes(6), (3, 2, 1), "uint8")
    assert sample(experts=fits).experts is fits
    with pytest.raises(BadExperts, match="a sequence of 4 tokens"):
        sample(experts=RoutedExperts(bytes(8), (4, 2, 1), "uint8"))


def test_arrays_have_the_types_a_trainer_wants() -> None:
    arrays, tensors = sample().numpy(), sample().torch()
    assert {name: a.dtype.name for name, a in arrays.items()} == {
        "token_ids": "int64", "sampled_mask": "bool", "logprobs": "float32",
    }  # fmt: skip
    assert tensors["logprobs"].dtype == torch.float32
    assert tensors["token_ids"].tolist() == [1, 2, 3, 4]


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Samples of any number of turns, with floats that a trip through text could spoil."""
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    for _ in range(draw(st.integers(1, 3))):
        prompt, output = (draw(st.lists(st.integers(0, 2**31 - 2), max_size=5)) for _ in range(2))
        labels = [draw(st.sampled_from(["v1", "v2+é@\n"])) for _ in output]
        start = len(tokens) + len(prompt)
        versions += [
            VersionSpan(one.version, start + one.start, start + one.end)
            for one in merge_spans(labels)
        ]
        tokens += prompt + output
        mask += [False] * len(prompt) + [True] * len(output)
        logprobs += [0.0] * len(prompt) + [draw(st.floats(-9998, 0, width=32)) for _ in output]
    experts = None
    if draw(st.booleans()):
        rows = max(len(tokens) - 1, 0)
        data = draw(st.binary(min_size=rows * 4, max_size=rows * 4))
        experts = RoutedExperts(data, (rows, 2, 1), "uint16")
    support = None
    if draw(st.booleans()):
        sets = [[token] if held else [] for token, held in zip(tokens, mask, strict=True)]
        support = Support.of_ids(sets)
    return Sample(
        token_ids=tokens,
        sampled_mask=mask,
        logprobs=logprobs,
        versions=tuple(versions),
        logprob_mode=draw(st.sampled_from(["raw", "processed"])),
        temperature=draw(st.floats(0, 2)),
        experts=experts,
        support=support,
        adapter=draw(st.none() | st.text()),
        breaks=tuple(draw(st.lists(st.text(max_size=5), max_size=2))),
        aborts=draw(st.integers(0, 3)),
        workers=tuple(draw(st.lists(st.text(max_size=3), max_size=2))),
    )


@given(samples())
def test_a_sample_survives_json_to_the_last_bit(made: Sample) -> None:
    line = made.to_json()
    assert b"\n" not in line
    again = Sample.from_json(line)
    assert again == made
    assert again.logprobs == made.logprobs
    assert Sample.from_json(line.decode()) == made


@pytest.mark.failure_mode("F100")
def test_a_sample_drawn_from_unrecorded_sets_is_marked() -> None:
    shaping = (ShapedSpan(1, 3, Shaping(top_p=0.9)),)
    absent = sample(shaping=shaping)
    assert absent.support_absent
    assert b'"support":"absent"' in absent.to_json()
    assert Sample.from_json(absent.to_json()) == absent
    sets = Support.join([Support.unrecorded(1, 9), Support.of_ids([[2], [3, 4]], 9)])
    recorded = sample(shaping=shaping, support=Support.join([sets, Support.unrecorded(1, 9)]))
    assert not recorded.support_absent
    half = Support.join([sets.slice(0, 2), Support.unrecorded(2, 9)])
    assert sample(shaping=shaping, support=half).support_absent
    assert not sample(shaping=(ShapedSpan(1, 3, Shaping(presence_penalty=1.0)),)).support_absent
    wrong = Support.of_ids([[], [2], [4], []], 9)
    with pytest.raises(BadSupport, match="token 3 at position 2 is not in its own support"):
        sample(support=wrong)


def test_json_that_breaks_the_contract_is_refused() -> None:
    line = sample().to_json()
    with pytest.raises(BadLogprob):
        Sample.from_json(line.replace(b"[0.0,-0.5,-1.5,0.0]", b"[1.0,-0.5,-1.5,0.0]"))
    with pytest.raises(Exception, match="unknown field"):
        Sample.from_json(line.replace(b'"aborts"', b'"extra":1,"aborts"'))
    with pytest.raises(Exception, match="missing required field `logprob_mode`"):
        Sample.from_json(line.replace(b'"logprob_mode":"raw",', b""))
    assert np.isfinite(Sample.from_json(line).logprobs).all()


def test_a_line_from_before_a_field_came_is_read_with_its_default() -> None:
    line = sample(kind="main").to_json()
    assert Sample.from_json(line.replace(b',"kind":"main"', b"")).kind == "unknown"
