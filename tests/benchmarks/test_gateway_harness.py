"""The gateway benchmark measures what it says: real answers, all of them counted and right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.gateway.bench import Bench, Failed, bench
from benchmarks.gateway.reading import check
from benchmarks.gateway.responses import vllm_generate, vllm_generate_events
from benchmarks.gateway.traffic import Said

CASES = ("2k", "2k-sessions", "stream", "stream-sessions")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1"
SAID = Said([5, 6, 7], [-0.5, -0.25, -1.0], ["a", " b"])


@pytest.fixture(scope="module")
def running() -> Iterator[Bench]:
    with bench(("lockstep", "lockstep-worker"), CASES, "tiny") as started:
        yield started


@pytest.mark.parametrize("name", ["lockstep", "lockstep-worker"])
@pytest.mark.parametrize("case", CASES)
def test_every_answer_through_a_real_gateway_is_counted_and_right(
    running: Bench, name: str, case: str
) -> None:
    done = running.round(name, case, seconds=0.0)
    assert done.requests == 64
    assert done.checked == 2
    assert done.cpu_seconds > 0


def test_a_round_that_was_not_prepared_fails_and_the_next_one_works(running: Bench) -> None:
    with pytest.raises(Failed, match="KeyError: '16k-sessions'"):
        running.round("lockstep", "16k-sessions", seconds=0.0)
    assert running.round("lockstep", "2k", seconds=0.0).requests == 64


@pytest.mark.parametrize(
    ("sent", "trouble"),
    [
        (Said([5, 6, 8], SAID.logprobs, SAID.pieces), "ids"),
        (Said(SAID.ids, [-0.5, -0.26, -1.0], SAID.pieces), "logprob 1 is"),
        (Said([5, 6], SAID.logprobs[:2], SAID.pieces[:1]), "2 logprobs for 3 tokens"),
    ],
)
def test_an_answer_that_differs_from_what_was_sent_is_found(sent: Said, trouble: str) -> None:
    check("generate", HEAD, vllm_generate(SAID, 8), SAID, stream=False)
    with pytest.raises(ValueError, match=trouble):
        check("generate", HEAD, vllm_generate(sent, 8), SAID, stream=False)


def test_a_stream_without_its_end_is_found() -> None:
    *events, end = vllm_generate_events(SAID)
    check("generate", HEAD, b"".join([*events, end]), SAID, stream=True)
    with pytest.raises(ValueError, match="no end"):
        check("generate", HEAD, b"".join(events), SAID, stream=True)


def test_a_session_that_broke_is_found() -> None:
    head = HEAD + b"\r\nx-lockstep-break: edited_history"
    with pytest.raises(ValueError, match="a session broke"):
        check("generate", head, vllm_generate(SAID, 8), SAID, stream=False)
