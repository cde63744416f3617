"""The engine with its thread: async calls, streams, cancellation and pauses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lockstep.engine import Engine, StreamedToken
from lockstep.tokens.errors import (
    BadRequest,
    BadTokenId,
    Conflict,
    UnknownModel,
)
from tests.engine.rig import Rig, ids, request
from tests.engine.running import LONG, start, until_running


@pytest.mark.exact_arithmetic
async def test_concurrent_requests_give_the_same_results_as_alone(
    engine: Engine, tiny: Path
) -> None:
    alone = Rig(tiny, weight_version="v1", max_seqs=1, logprob_mode="processed")
    prompts = [ids(i, 10 + 20 * i) for i in range(8)]
    results = await asyncio.gather(*(engine.generate(request(p, seed=1)) for p in prompts))
    for prompt, (completion,) in zip(prompts, results, strict=True):
        assert completion == alone.generate(prompt, seed=1)


async def test_a_stream_is_the_completion_in_pieces(engine: Engine) -> None:
    engine_request = request(ids(1, 20), n=3, max_tokens=6, logprobs=2)
    whole = await engine.generate(engine_request)
    pieces: list[StreamedToken] = [piece async for piece in engine.stream(engine_request)]
    for completion in whole:
        mine = [piece for piece in pieces if piece.index == completion.index]
        sampled = [piece.sampled for piece in mine if piece.sampled is not None]
        assert [s.token_id for s in sampled] == completion.token_ids
        assert [s.logprob for s in sampled] == completion.logprobs
        assert [s.rank for s in sampled] == completion.ranks
        assert [s.top for s in sampled] == completion.top_logprobs
        assert [piece.completion for piece in mine] == [None] * 5 + [completion]


async def test_a_rejected_request_raises_at_once(engine: Engine) -> None:
    with pytest.raises(BadTokenId):
        await engine.generate(request([]))
    with pytest.raises(BadTokenId):
        await anext(engine.stream(request([-1])))
    with pytest.raises(UnknownModel):
        await engine.check(request([1], adapter="nobody"))
    with pytest.raises(BadRequest, match="lora_name is ''"):
        await engine.load_adapter("", Path("x"))
    with pytest.raises(BadRequest, match="mode is 'nap'"):
        await engine.pause("nap")  # type: ignore[arg-type]


@pytest.mark.failure_mode("F47")
@pytest.mark.parametrize("n", [1, 6])
async def test_cancelling_the_caller_stops_the_request_within_a_step(
    engine: Engine, n: int
) -> None:
    task = await start(engine, n=n)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps = engine.core.steps
    await engine.ping()
    assert engine.core.handles == {}
    assert engine.core.scheduler.running == []
    assert engine.core.steps - steps <= 2


@pytest.mark.failure_mode("F47")
async def test_a_caller_cancelled_during_submission_leaves_nothing(engine: Engine) -> None:
    for ticks in range(4):
        task = asyncio.create_task(engine.generate(request(ids(1, 20), max_tokens=LONG)))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.ping()
        assert engine.core.handles == {}


@pytest.mark.failure_mode("F47")
async def test_closing_a_stream_stops_its_request(engine: Engine) -> None:
    stream = engine.stream(request(ids(1, 20), max_tokens=LONG))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await engine.ping()
    assert engine.core.handles == {}


@pytest.mark.failure_mode("F45")
async def test_abort_ends_and_counts_requests(engine: Engine) -> None:
    tasks = [await start(engine, request_id="twin") for _ in range(2)]
    assert await engine.abort("twin") == 2
    for task in tasks:
        (completion,) = await task
        assert (completion.finish, completion.request_id) == ("abort", "twin")
    assert await engine.abort("twin") == 0


@pytest.mark.failure_mode("F12")
async def test_pause_abort_returns_partial_completions(engine: Engine) -> None:
    task = await start(engine)
    await engine.pause("abort")
    (completion,) = await task
    assert completion.finish == "abort"
    late = asyncio.create_task(engine.generate(request(ids(2, 20))))
    await engine.ping()
    assert not late.done()
    await engine.resume()
    assert (await late)[0].finish == "length"


async def test_pause_wait_returns_when_drained(engine: Engine) -> None:
    task = asyncio.create_task(engine.generate(request(ids(1, 20), max_tokens=40)))
    await until_running(engine)
    await engine.pause("wait")
    assert engine.core.scheduler.running == []
    assert (await task)[0].finish == "length"
    await engine.resume()


async def test_resume_during_a_drain_raises_conflict_in_the_pause(engine: Engine) -> None:
    task = await start(engine, request_id="long")
    drain = asyncio.create_task(engine.pause("wait"))
    while engine.stats()["state"] != "draining":
        await engine.ping()
    await engine.resume()
    with pytest.raises(Conflict, match="resumed before"):
        await drain
    await engine.abort("long")
    await task


async def test_counters_count(engine: Engine) -> None:
    await engine.flush_cache()
    before = engine.stats()
    for _ in range(2):
        await engine.generate(request(ids(77, 100), max_tokens=4))
    after = engine.stats()

    def grown(name: str) -> int:
        return int(after[name]) - int(before[name])

    assert (grown("prompt_tokens"), grown("generated_tokens")) == (200, 8)
    assert (grown("prefix_query_tokens"), grown("prefix_hit_tokens")) == (200, 96)
    assert after["arithmetic"] == engine.arithmetic == after["numerics"]["arithmetic"]
    assert await engine.flush_cache() == after["prefix_blocks"] > 0
    assert engine.stats()["prefix_blocks"] == 0


@pytest.mark.failure_mode("F47")
async def test_nothing_is_left_after_a_thousand_requests(engine: Engine) -> None:
    async def one(i: int) -> None:
        task = asyncio.create_task(
            engine.generate(request([i % 500, 3], max_tokens=2 + 30 * (i % 5 == 0)))
        )
        if i % 5 == 0:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for start_at in range(0, 1000, 50):
        await asyncio.gather(*(one(i) for i in range(start_at, start_at + 50)))
    await engine.ping()
    assert engine.busy is False
    assert engine._outbox == {}
