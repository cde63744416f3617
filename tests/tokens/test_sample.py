"""Sample: what a trainer gets from consecutive turns, and what it is never given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tokens import Completion, Finish, RoutedExperts, Sample, VersionSpan, merge_spans
from lockstep.tokens.errors import (
    BadExperts,
    BadLogprob,
    BadVersions,
    Conflict,
    Misaligned,
    PrefixBreak,
)


def turn(prompt: list[int], output: list[int], **changes: Any) -> Completion:
    labels = changes.pop("labels", "a" * len(output))
    fields: dict[str, Any] = {
        "prompt_ids": prompt,
        "token_ids": output,
        "logprobs": [-0.5 - at for at in range(len(output))],
        "finish": "stop",
        "versions": merge_spans(labels),
    }
    return Completion(**(fields | changes))


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "token_ids": [1, 2, 3, 4],
        "sampled_mask": [False, True, True, False],
        "logprobs": [0.0, -0.5, -1.5, 0.0],
        "versions": (VersionSpan("a", 1, 3),),
    }
    return Sample(**(fields | changes))


def test_turns_become_one_sequence_with_what_was_sampled_marked() -> None:
    first = turn([1, 2], [3, 4], labels="ab", worker="w1")
    second = turn([1, 2, 3, 4, 9], [5], worker="w2")
    third = turn([1, 2, 3, 4, 9, 5], [6], worker="w1", finish="abort")
    made = Sample.of([first, second, third], breaks=["edited_history"])
    assert made.token_ids == [1, 2, 3, 4, 9, 5, 6]
    assert made.sampled_mask == [False, False, True, True, False, True, True]
    assert made.logprobs == [0.0, 0.0, -0.5, -1.5, 0.0, -0.5, -0.5]
    assert made.versions == (
        VersionSpan("a", 2, 3), VersionSpan("b", 3, 4), VersionSpan("a", 5, 6),
        VersionSpan("a", 6, 7),
    )  # fmt: skip
    assert (made.workers, made.aborts, made.trainable) == (("w1", "w2"), 1, False)
    assert made.breaks == ("edited_history",)
    assert Sample.of([first]).trainable


@pytest.mark.failure_mode("F16")
@pytest.mark.parametrize(
    ("field", "value"), [("logprob_mode", "processed"), ("temperature", 0.7), ("adapter", "x")]
)
def test_turns_whose_logprobs_are_not_comparable_are_refused(field: str, value: Any) -> None:
    turns = [turn([1], [2]), turn([1, 2], [3], **{field: value})]
    with pytest.raises(Conflict, match=f"turn 1 has {field}") as refused:
        Sample.of(turns)
    assert refused.value.param == field
    same = Sample.of([turn([1], [2], **{field: value}), turns[1]])
    assert getattr(same, field) == value


@pytest.mark.parametrize("prompt", [[1, 9, 3], [1], [], [1, 2, 4, 3]])
def test_a_turn_that_does_not_start_with_the_ids_before_it_is_a_prefix_break(
    prompt: list[int],
) -> None:
    with pytest.raises(PrefixBreak, match="the prompt of turn 1 does not start with the 3 ids"):
        Sample.of([turn([1, 2], [3]), turn(prompt, [5])])


def test_a_sample_of_nothing_is_refused() -> None:
    with pytest.raises(Conflict, match="at least one completion"):
        Sample.of([])


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
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)
    shared = {
        "logprob_mode": draw(st.sampled_from(["raw", "processed"])),
        "temperature": draw(st.floats(0, 2)),
        "adapter": draw(st.none() | st.text()),
    }
    turns: list[Completion] = []
    prompt: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = prompt + draw(ids)
        output = draw(ids)
        finish: Finish = draw(st.sampled_from(["stop", "length", "abort"]))
        logprobs = draw(st.lists(st.floats(-9998, 0, width=32), min_size=len(output),
                                 max_size=len(output)))  # fmt: skip
        labels = [draw(st.sampled_from(["v1", "v2+é@\n"])) for _ in output]
        turns.append(turn(prompt, output, logprobs=logprobs, labels=labels, finish=finish,
                          worker=draw(st.none() | st.text(max_size=3)), **shared))  # fmt: skip
        prompt = prompt + output
    made = Sample.of(turns, breaks=draw(st.lists(st.text(max_size=5), max_size=2)))
    if not draw(st.booleans()):
        return made
    rows = max(len(made.token_ids) - 1, 0)
    data = draw(st.binary(min_size=rows * 4, max_size=rows * 4))
    fields = {name: getattr(made, name) for name in Sample.__dataclass_fields__}
    return Sample(**fields | {"experts": RoutedExperts(data, (rows, 2, 1), "uint16")})


@given(samples())
def test_a_sample_survives_json_to_the_last_bit(made: Sample) -> None:
    line = made.to_json()
    assert b"\n" not in line
    again = Sample.from_json(line)
    assert again == made
    assert again.logprobs == made.logprobs
    assert Sample.from_json(line.decode()) == made


def test_json_that_breaks_the_contract_is_refused() -> None:
    line = sample().to_json()
    with pytest.raises(BadLogprob):
        Sample.from_json(line.replace(b"[0.0,-0.5,-1.5,0.0]", b"[1.0,-0.5,-1.5,0.0]"))
    with pytest.raises(Exception, match="unknown field"):
        Sample.from_json(line.replace(b'"aborts"', b'"extra":1,"aborts"'))
    assert np.isfinite(Sample.from_json(line).logprobs).all()
