"""Scheduling: chunks, priorities, waiting, and requests that can never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.engine.model.model import ModelBatch
from lockstep.tokens.errors import BadRequest, PromptTooLong
from tests.engine.rig import Result, Rig, ids


@pytest.fixture
def rig(tiny: Path) -> Rig:
    return Rig(tiny, max_seqs=3, max_batch_tokens=32, prefix_cache_bytes=0)


def test_a_prompt_is_computed_in_chunks_while_others_decode(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    batch = rig.core.model.batch

    def watch(segments: list) -> ModelBatch:  # type: ignore[type-arg]
        sizes.append(sum(len(segment.tokens) for segment in segments))
        return batch(segments)

    monkeypatch.setattr(rig.core.model, "batch", watch)
    talker = rig.submit(ids(1, 5), max_tokens=50)
    rig.run(3)
    reader = rig.submit(ids(2, 200), max_tokens=4)
    before = len(talker.tokens_so_far)
    while not reader.tokens_so_far:
        rig.run(1)
    steps = len(talker.tokens_so_far) - before
    assert steps == -(-200 // 31), "one token a step for the talker, the rest for the reader"
    assert max(sizes) <= 32
    rig.run()
    assert reader.ended
    assert talker.ended


def test_the_budget_never_starves_decoding(tiny: Path) -> None:
    rig = Rig(tiny, max_seqs=6, max_batch_tokens=1)
    results = [rig.submit(ids(i, 10), max_tokens=5) for i in range(6)]
    rig.run(200)
    assert all(result.ended for result in results)


def order_of_first_tokens(rig: Rig, results: list[Result]) -> list[int]:
    order: list[int] = []
    while rig.core.has_work:
        rig.run(1)
        for at, result in enumerate(results):
            if result.tokens_so_far and at not in order:
                order.append(at)
    return order


def test_lower_priority_numbers_run_first_then_arrival_order(tiny: Path) -> None:
    rig = Rig(tiny, max_seqs=1)
    priorities = [0, 5, -3, 0, 5, -3]
    rig.pause("keep")
    results = [rig.submit(ids(i, 9), priority=p) for i, p in enumerate(priorities)]
    rig.core.resume()
    assert order_of_first_tokens(rig, results) == [2, 5, 0, 3, 1, 4]


def test_a_request_that_does_not_fit_waits_for_a_slot(rig: Rig) -> None:
    results = [rig.submit(ids(i, 9), max_tokens=3 + 4 * i) for i in range(5)]
    rig.run(2)
    assert [bool(a.tokens_so_far) for a in results] == [True, True, True, False, False]
    assert len(rig.core.scheduler.running) == 3
    assert [s.request.prompt_ids for s in rig.core.scheduler.waiting] == [ids(3, 9), ids(4, 9)]
    rig.run()
    assert all(a.one.finish == "length" for a in results)
    assert rig.idle


@pytest.mark.failure_mode("F17")
def test_a_prompt_without_room_for_one_token_is_rejected_with_both_numbers(tiny: Path) -> None:
    rig = Rig(tiny, max_model_len=64)
    with pytest.raises(PromptTooLong, match=r"maximum context length is 64 .* has 64"):
        rig.submit(ids(1, 64))
    with pytest.raises(PromptTooLong, match=r"has 64"):
        rig.submit(ids(1, 64), prompt_logprobs=0, max_tokens=2)
    assert rig.idle
    last = rig.generate(ids(1, 63), max_tokens=None)
    assert (len(last.token_ids), last.finish) == (1, "length")
    assert len(rig.core.score(ids(1, 64))) == 63
    with pytest.raises(PromptTooLong, match=r"is 64 .* 65 tokens"):
        rig.core.score(ids(1, 65))


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("chunk", [16, 128])
def test_a_prompt_that_fills_the_context_can_be_scored(tiny: Path, chunk: int) -> None:
    rig = Rig(tiny, max_model_len=64, max_batch_tokens=chunk)
    prompt = ids(1, 64)
    shorter = rig.generate(prompt[:63], prompt_logprobs=0, max_tokens=1).prompt_logprobs
    completion = rig.generate(prompt, prompt_logprobs=0, max_tokens=1)
    assert completion.prompt_logprobs is not None
    assert shorter is not None
    assert completion.prompt_logprobs[:63] == shorter
    scores = [entry.logprob for entry in completion.prompt_logprobs if entry is not None]
    assert scores == rig.core.score(prompt)
    with pytest.raises(PromptTooLong, match=r"is 64 .* has 65"):
        rig.submit(ids(1, 65), prompt_logprobs=0, max_tokens=1)


def test_output_stops_at_the_length_of_the_model(tiny: Path) -> None:
    rig = Rig(tiny, max_model_len=64)
    completion = rig.generate(ids(1, 50), max_tokens=1000)
    assert (len(completion.token_ids), completion.finish) == (14, "length")


@pytest.mark.parametrize("length", [1, 1_000_000])
def test_a_length_beyond_the_models_is_rejected(tiny: Path, length: int) -> None:
    with pytest.raises(BadRequest, match="max_model_len"):
        Rig(tiny, max_model_len=length)


@pytest.mark.exact_arithmetic
def test_slots_stay_dense_when_one_in_the_middle_leaves(tiny: Path) -> None:
    rig = Rig(tiny, max_seqs=5)
    alone = [Rig(tiny).generate(ids(i, 20 + i), max_tokens=20) for i in range(5)]
    results = [rig.submit(ids(i, 20 + i), max_tokens=20, request_id=str(i)) for i in range(5)]
    rig.run(6)
    for gone in ("0", "3"):
        assert rig.core.abort(gone) == 1
        rig.run(2)
    rig.run()
    for at in (1, 2, 4):
        assert results[at].one.token_ids == alone[at].token_ids
        assert results[at].one.logprobs == alone[at].logprobs
    for at in (0, 3):
        partial = results[at].one
        assert partial.finish == "abort"
        assert partial.token_ids == alone[at].token_ids[: len(partial.token_ids)]


def test_nothing_is_left_after_many_requests_and_aborts(tiny: Path) -> None:
    rig = Rig(tiny, max_seqs=8)
    for i in range(1000):
        result = rig.submit([i % 500, 1, 2], max_tokens=2, n=1 + i % 2, request_id=f"r{i}")
        if i % 3 == 0:
            assert rig.core.abort(f"r{i}") == 1
        elif i % 3 == 1:
            rig.core.drop(result.handle)
        if i % 4 == 0:
            rig.run(1)
    rig.run()
    assert rig.idle
    assert len(rig.core.prefixes) <= rig.core.prefixes.capacity
