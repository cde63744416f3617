"""Pausing: abort, wait and keep, with requests in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine.core import PauseMode
from lockstep.tokens.errors import Conflict
from tests.engine.checkpoints import reference
from tests.engine.rig import Rig, ids


@pytest.fixture
def rig(tiny: Path) -> Rig:
    return Rig(tiny, max_seqs=3)


@pytest.mark.failure_mode("F12")
def test_abort_ends_all_requests_with_their_partial_tokens(rig: Rig) -> None:
    running = [rig.submit(ids(i, 20), max_tokens=30) for i in range(3)]
    waiting = rig.submit(ids(9, 20), max_tokens=30)
    rig.run(6)
    assert rig.pause("abort") == [None]
    for result in running:
        assert result.one.finish == "abort"
        assert not result.one.complete
        assert 0 < len(result.one.token_ids) < 30
        assert len(result.one.logprobs) == len(result.one.token_ids)
    assert (waiting.one.finish, waiting.one.token_ids) == ("abort", [])
    assert rig.idle


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F12")
def test_an_aborted_request_can_be_continued_token_exactly(rig: Rig) -> None:
    prompt = ids(1, 20)
    whole = rig.generate(prompt, max_tokens=24, temperature=0)
    cut = rig.submit(prompt, max_tokens=24, temperature=0)
    rig.run(10)
    rig.pause("abort")
    rig.core.resume()
    partial = cut.one.token_ids
    assert partial == whole.token_ids[: len(partial)]
    rest = rig.generate(prompt + partial, max_tokens=24 - len(partial), temperature=0)
    assert partial + rest.token_ids == whole.token_ids
    assert cut.one.logprobs + rest.logprobs == whole.logprobs


def test_an_aborted_prefill_has_no_tokens_and_no_half_scored_prompt(rig: Rig) -> None:
    result = rig.submit(ids(1, 400), prompt_logprobs=0)
    rig.run(2)
    rig.pause("abort")
    assert (result.one.token_ids, result.one.prompt_logprobs) == ([], None)


def test_wait_finishes_running_requests_and_starts_no_new_ones(rig: Rig) -> None:
    running = [rig.submit(ids(i, 20), max_tokens=5 + i) for i in range(3)]
    waiting = rig.submit(ids(9, 20))
    rig.run(2)
    quiet = rig.pause("wait")
    late = rig.submit(ids(10, 20))
    assert quiet == []
    rig.run()
    assert quiet == [None]
    assert [a.one.finish for a in running] == ["length"] * 3
    assert not waiting.ended
    assert not late.ended
    rig.core.resume()
    rig.run()
    assert waiting.one.finish == late.one.finish == "length"


@pytest.mark.parametrize("tokens", [1, 5])
def test_wait_finishes_all_choices_of_a_started_request(rig: Rig, tokens: int) -> None:
    """Otherwise its later choices would be sampled under the weights after the pause."""
    begun = rig.submit(ids(1, 300), n=7, max_tokens=tokens)
    rig.run(2)
    queued = rig.submit(ids(2, 40), n=2, max_tokens=5)
    quiet = rig.pause("wait")
    rig.run()
    assert quiet == [None]
    assert len(begun.completions) == 7
    assert not queued.ended
    assert queued.tokens_so_far == []


def test_wait_on_a_quiet_engine_returns_at_once(rig: Rig) -> None:
    assert rig.pause("wait") == [None]
    assert rig.core.state == "paused"


def test_resume_during_a_drain_raises_conflict(rig: Rig) -> None:
    result = rig.submit(ids(1, 20))
    rig.run(2)
    quiet = rig.pause("wait")
    rig.core.resume()
    (error,) = quiet
    assert isinstance(error, Conflict)
    assert "resumed before" in error.message
    rig.run()
    assert result.one.finish == "length"
    assert len(quiet) == 1


def test_a_drain_ends_quietly_by_abort_but_not_by_keep(rig: Rig) -> None:
    rig.submit(ids(1, 20))
    rig.run(2)
    first = rig.pause("wait")
    assert rig.pause("keep") == [None]
    assert isinstance(first[0], Conflict)
    second = rig.pause("wait")
    assert rig.pause("abort") == [None]
    assert second == [None]


@pytest.mark.parametrize("end", ["abort", "drop"])
def test_a_drain_ends_when_the_last_request_is_dropped(rig: Rig, end: str) -> None:
    result = rig.submit(ids(1, 20), request_id="r", n=4)
    rig.run(2)
    quiet = rig.pause("wait")
    rig.core.abort("r") if end == "abort" else rig.core.drop(result.handle)
    assert quiet == [None]
    assert rig.idle


@pytest.mark.exact_arithmetic
def test_resume_after_keep_continues_unchanged(rig: Rig, tiny: Path) -> None:
    alone = Rig(tiny).generate(ids(1, 20), max_tokens=20)
    result = rig.submit(ids(1, 20), max_tokens=20)
    rig.run(5)
    assert rig.pause("keep") == [None]
    frozen = list(result.tokens_so_far)
    rig.run(5)
    assert result.tokens_so_far == frozen
    assert rig.core.score(ids(5, 300)) == reference(tiny, ids(5, 300)), "scoring goes on meanwhile"
    rig.core.resume()
    rig.run()
    assert result.one == alone


def test_keep_then_wait_drains_the_frozen_requests(rig: Rig) -> None:
    result = rig.submit(ids(1, 20))
    rig.run(2)
    rig.pause("keep")
    quiet = rig.pause("wait")
    rig.run()
    assert result.one.finish == "length"
    assert quiet == [None]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_new_requests_queue_while_paused(rig: Rig, mode: PauseMode) -> None:
    rig.pause(mode)
    result = rig.submit(ids(1, 20))
    assert not rig.core.has_work
    rig.run()
    assert result.events == []
    rig.core.resume()
    rig.run()
    assert result.one.finish == "length"


@pytest.mark.failure_mode("F45")
def test_abort_ends_and_counts_two_requests_with_one_id(rig: Rig) -> None:
    twins = [rig.submit(ids(i, 20), request_id="twin", n=2) for i in range(2)]
    other = rig.submit(ids(5, 20), request_id="other")
    rig.run(3)
    assert rig.core.abort("twin") == 2
    assert rig.core.abort("twin") == 0
    assert rig.core.abort("nobody") == 0
    for twin in twins:
        assert [c.finish for c in twin.completions] == ["abort"] * 2
        assert [c.request_id for c in twin.completions] == ["twin"] * 2
    rig.run()
    assert other.one.finish == "length"
    both = [rig.submit(ids(i, 20), request_id="again") for i in range(2)]
    rig.run()
    assert [result.one.prompt_ids for result in both] == [ids(0, 20), ids(1, 20)]


def test_an_abort_keeps_the_choices_that_had_ended(rig: Rig) -> None:
    result = rig.submit(ids(1, 20), n=6, max_tokens=4, request_id="r")
    rig.run(6)
    rig.core.abort("r")
    finishes = {c.finish for c in result.completions}
    assert finishes == {"length", "abort"}
    assert len(result.completions) == 6
