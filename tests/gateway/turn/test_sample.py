"""A finished choice must begin with the tokens and logprobs that were streamed before it."""

from __future__ import annotations

import pytest

from lockstep.gateway.turn.progress import ChoiceProgress
from lockstep.protocol.common.response import StreamDelta
from lockstep.render import Renderer
from lockstep.render.streaming_parser import StreamingParser
from lockstep.tokens import Completion, VersionSpan
from lockstep.tokens.errors import Misaligned

IDS = [20, 21, 22]
DOUBLES = [-0.12345679104328156, -2.3841855067985307e-07, -3.710000038146973]
DECIMALS = [-0.12345679, -2.3841855e-07, -3.71]
"""The same numbers as a Dynamo frontend streams them: the shortest decimals of 32-bit floats."""


def progress(logprobs: list[float]) -> ChoiceProgress:
    renderer = Renderer.load("tiny")
    parser = StreamingParser(renderer, None, renderer.render([{"role": "user", "content": "x"}]))
    choice = ChoiceProgress(parser)
    choice.add(StreamDelta(0, IDS[:2], logprobs[:2]))
    choice.add(StreamDelta(0, IDS[2:], logprobs[2:]))
    return choice


def completion(ids: list[int], logprobs: list[float]) -> Completion:
    spans = (VersionSpan("default", 0, len(ids)),)
    return Completion(
        token_ids=ids, logprobs=logprobs, prompt_ids=[1], finish="length", versions=spans
    )


def test_a_stream_of_short_decimals_begins_its_choice_of_doubles() -> None:
    choice = progress(DECIMALS)
    choice.complete(completion([*IDS, 23], [*DOUBLES, -1.0]))
    assert choice.token_ids == [*IDS, 23]
    assert choice.logprobs == [*DOUBLES, -1.0]


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        (IDS, [DOUBLES[0], DOUBLES[1], -3.7100005]),  # two 32-bit floats further on
        ([20, 21, 23], DOUBLES),
        (IDS[:2], DOUBLES[:2]),
    ],
)
def test_another_number_or_token_than_streamed_is_an_error(
    ids: list[int], logprobs: list[float]
) -> None:
    with pytest.raises(Misaligned, match="does not begin with the 3 tokens"):
        progress(DECIMALS).complete(completion(ids, logprobs))
