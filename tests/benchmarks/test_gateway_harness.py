"""The gateway benchmark measures what it says: real responses, all of them counted and right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.gateway.bench import Bench, Failed, bench
from benchmarks.gateway.reading import check
from benchmarks.gateway.responses import vllm_generate, vllm_generate_events
from benchmarks.gateway.traffic import CannedCompletion, Case

CASES = ("2k", "2k-sessions", "stream", "stream-sessions")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1"
COMPLETION = CannedCompletion([5, 6, 7], [-0.5, -0.25, -1.0], ["a", " b"])
WHOLE, STREAMED = Case(8, 3), Case(8, 3, stream=True)


@pytest.fixture(scope="module")
def running() -> Iterator[Bench]:
    with bench(("lockstep", "lockstep-worker"), CASES, "tiny") as started:
        yield started


@pytest.mark.parametrize("name", ["lockstep", "lockstep-worker"])
@pytest.mark.parametrize("case", CASES)
def test_every_answer_through_a_real_gateway_is_counted_and_right(
    running: Bench, name: str, case: str
) -> None:
    round_ = running.round(name, case, seconds=0.0)
    assert round_.requests == 64
    assert round_.checked == 2
    assert round_.cpu_seconds > 0


def test_a_round_that_was_not_prepared_fails_and_the_next_one_works(running: Bench) -> None:
    with pytest.raises(Failed, match="KeyError: '16k-sessions'"):
        running.round("lockstep", "16k-sessions", seconds=0.0)
    assert running.round("lockstep", "2k", seconds=0.0).requests == 64


@pytest.mark.parametrize(
    ("sent", "trouble"),
    [
        (CannedCompletion([5, 6, 8], COMPLETION.logprobs, COMPLETION.pieces), "ids"),
        (CannedCompletion(COMPLETION.ids, [-0.5, -0.26, -1.0], COMPLETION.pieces), "logprob 1 is"),
        (
            CannedCompletion([5, 6], COMPLETION.logprobs[:2], COMPLETION.pieces[:1]),
            "2 logprobs for 3 tokens",
        ),
    ],
)
def test_an_answer_that_differs_from_what_was_sent_is_found(
    sent: CannedCompletion, trouble: str
) -> None:
    check("generate", HEAD, vllm_generate(COMPLETION, 8), COMPLETION, WHOLE)
    with pytest.raises(ValueError, match=trouble):
        check("generate", HEAD, vllm_generate(sent, 8), COMPLETION, WHOLE)


def test_a_stream_without_its_end_is_found() -> None:
    *events, end = vllm_generate_events(COMPLETION)
    check("generate", HEAD, b"".join([*events, end]), COMPLETION, STREAMED)
    with pytest.raises(ValueError, match="no end"):
        check("generate", HEAD, b"".join(events), COMPLETION, STREAMED)


def test_a_session_that_broke_is_found() -> None:
    head = HEAD + b"\r\nx-lockstep-break: edited_history"
    with pytest.raises(ValueError, match="a session broke"):
        check("generate", head, vllm_generate(COMPLETION, 8), COMPLETION, WHOLE)
