"""Probes are scored in parallel to generation, with the engine's own results."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.engine import Engine, EngineOptions
from lockstep.tokens.errors import BadTokenId, Conflict, EngineFailure, PromptTooLong, Unavailable
from lockstep.worker.prober import Prober

SEQUENCES = [[11, 29, 3, 77, 5, 140, 9], list(range(1, 100)), *([at, at + 1] for at in range(20))]


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine("tiny", EngineOptions(max_model_len=256, max_seqs=2)) as running:
        yield running


@pytest.mark.exact_arithmetic
async def test_a_probe_does_not_block_the_engine_unless_it_is_paused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await engine.score_all(SEQUENCES)

    def busy(*_: object, **__: object) -> None:
        raise Conflict("the engine has other things to do")

    monkeypatch.setattr(engine.core, "score_all", busy)
    assert (await Prober(engine).score_all(SEQUENCES)).logprobs == expected
    await engine.pause("keep")
    with pytest.raises(Conflict, match="other things"):
        await Prober(engine).score_all(SEQUENCES)


async def test_a_probe_that_nobody_waits_for_stops(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober = Prober(engine)
    started, ended = threading.Event(), threading.Event()

    def score(*arguments: Any) -> list[list[float]]:
        is_abandoned = arguments[-1]
        started.set()
        while not is_abandoned():
            time.sleep(0.005)
        ended.set()
        return []

    with monkeypatch.context() as patch:
        patch.setattr(prober, "_score", score)
        probe = asyncio.create_task(prober.score_all(SEQUENCES))
        assert await asyncio.to_thread(started.wait, 60)
        probe.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probe
        assert await asyncio.to_thread(ended.wait, 60)
    passes = iter([False, False, True])
    with pytest.raises(Unavailable, match="not needed any more"):
        prober._score(prober.weights(False), [[1, 2]] * 500, None, lambda: next(passes))


@pytest.mark.parametrize("length", [2, 63, 64, 65, 255, 256])
async def test_slots_are_sized_for_the_scored_sequences(engine: Engine, length: int) -> None:
    sequences = [[(7 * at + seed) % 500 for at in range(length)] for seed in range(30)]
    expected = await engine.score_all(sequences)
    assert (await Prober(engine).score_all(sequences)).logprobs == expected


@pytest.mark.exact_arithmetic
async def test_staged_weights_score_as_in_the_engine_and_are_not_kept_alive(
    engine: Engine, checkpoint: Callable[..., Path]
) -> None:
    prober = Prober(engine)
    with pytest.raises(Conflict, match="no weights are staged"):
        await prober.score_all(SEQUENCES, staged=True)
    staged = weakref.ref(prober.remember_staged(await engine.stage(checkpoint("b"), "B")))
    expected = await engine.score_all(SEQUENCES, staged=True)
    assert (await prober.score_all(SEQUENCES, staged=True)).logprobs == expected
    assert expected != (await prober.score_all(SEQUENCES)).logprobs
    await engine.rollback()
    gc.collect()
    assert staged() is None
    with pytest.raises(Conflict, match="no weights are staged"):
        await prober.score_all(SEQUENCES, staged=True)


async def test_weights_that_are_replaced_while_they_are_probed_prove_nothing(
    engine: Engine, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prober = Prober(engine)
    first = prober.remember_staged(await engine.stage(checkpoint("b"), "B"))
    other = await engine.stage(checkpoint("c", seed=2), "B")
    prober.remember_staged(first)

    def meanwhile(*_: object) -> list[list[float]]:
        prober.remember_staged(other)
        return [[0.0]]

    monkeypatch.setattr(prober, "_score", meanwhile)
    with pytest.raises(Conflict, match="replaced while being probed"):
        await prober.score_all([[1, 2]], staged=True)


async def test_bad_sequences_are_rejected_as_by_the_engine(engine: Engine) -> None:
    for wrong, error in (([[1, 1 << 20]], BadTokenId), ([[1] * 257], PromptTooLong)):
        for scorer in (engine, Prober(engine)):
            with pytest.raises(error):
                await scorer.score_all(wrong)


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F28")
@pytest.mark.parametrize("paused", [False, True])
async def test_only_the_weights_that_were_scored_are_committed_as_proved(
    engine: Engine, checkpoint: Callable[..., Path], paused: bool
) -> None:
    prober, path = Prober(engine), checkpoint("b")
    if paused:
        await engine.pause("keep")
    prober.remember_staged(await engine.stage(path, "B"))
    scored = await prober.score_all(SEQUENCES, staged=True)
    # The same bytes under the same label, staged again: another set, that nobody scored.
    again = prober.remember_staged(await engine.stage(path, "B"))
    for proof in (scored.weights, prober.name(again), "of another process"):
        with pytest.raises(Conflict, match="not those which that probe was scored on"):
            await prober.commit_proved(proof)
    assert (engine.version, engine.staged_version) == ("default", "B")
    # A probe of no sequences, or of what is live, proves nothing.
    assert (await prober.score_all([], staged=True)).weights == prober.name(again)
    await prober.score_all(SEQUENCES)
    with pytest.raises(Conflict, match="not those which"):
        await prober.commit_proved(prober.name(again))
    scored = await prober.score_all(SEQUENCES, staged=True)
    assert await prober.commit_proved(scored.weights) == "B"
    assert engine.core.served.weights is again
    assert await engine.score_all(SEQUENCES) == scored.logprobs
    with pytest.raises(Conflict, match="no weights are staged"):
        await prober.commit_proved(scored.weights)


@pytest.mark.failure_mode("F28")
async def test_an_engine_that_swaps_to_unproved_weights_is_a_failure(
    engine: Engine, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prober = Prober(engine)
    prober.remember_staged(await engine.stage(checkpoint("b"), "B"))
    scored = await prober.score_all(SEQUENCES, staged=True)
    other, commit = checkpoint("c", seed=2), engine.core.commit
    wrong = engine.core.served.load_weights(other, "B")
    monkeypatch.setattr(engine.core, "commit", lambda _: commit(wrong))
    with pytest.raises(EngineFailure, match="other weights than the proved ones"):
        await prober.commit_proved(scored.weights)
