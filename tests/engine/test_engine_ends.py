"""Failures and shutdown of the engine: every caller gets a response, and the engine keeps
running."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path

import pytest

from lockstep.engine import Engine
from lockstep.engine.core import Core
from lockstep.tokens.errors import (
    EngineFailure,
    Unavailable,
)
from tests.engine.rig import ids, request
from tests.engine.running import make, score, start


async def test_a_failed_step_fails_its_requests_and_the_engine_keeps_running(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(core: Core) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Core, "_step", broken)
        with pytest.raises(EngineFailure, match="out of memory"):
            await engine.generate(request(ids(1, 20)))
    assert (await engine.generate(request(ids(1, 20))))[0].finish == "length"


async def test_a_failed_command_returns_an_error_and_the_engine_keeps_running(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "score_all", broken)
        with pytest.raises(EngineFailure, match="out of memory"):
            await score(engine, [1, 2])
    assert len(await score(engine, [1, 2])) == 1


async def test_closing_fails_requests_in_flight_and_rejects_new_ones(tiny: Path) -> None:
    async with make(tiny) as engine:
        tasks = [await start(engine) for _ in range(2)]
        drain = asyncio.create_task(engine.pause("wait"))
        while engine.stats()["state"] != "draining":
            await engine.ping()
    for task in tasks:
        with pytest.raises(Unavailable, match="shutting down"):
            await task
    await drain
    assert not engine.alive
    for call in (engine.ping(), engine.generate(request([1])), engine.resume()):
        with pytest.raises(Unavailable, match="not running"):
            await call
    engine.close()


async def test_a_command_queued_before_the_close_always_gets_a_result(tiny: Path) -> None:
    """The command is queued while the thread is busy, and `close` before the thread reads the
    queue."""
    engine = make(tiny, arithmetic="close", max_model_len=64)
    engine.start()
    busy, go_on = threading.Event(), threading.Event()
    engine._post(lambda: busy.set() or go_on.wait())
    await asyncio.to_thread(busy.wait)
    calls = [asyncio.create_task(engine.ping())]
    calls += [asyncio.create_task(engine.generate(request([1])))]
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    while engine.alive:
        await asyncio.sleep(0)
    go_on.set()
    await closing
    pinged, generated = await asyncio.gather(*calls, return_exceptions=True)
    assert pinged is None
    assert isinstance(generated, Unavailable)


async def test_an_engine_that_was_not_started_raises(tiny: Path) -> None:
    engine = make(tiny, arithmetic="close", max_model_len=64)
    with pytest.raises(Unavailable, match="not running"):
        await engine.ping()
    engine.close()


def test_an_engine_that_is_closed_frees_its_cache_without_a_garbage_collection(tiny: Path) -> None:
    gc.disable()
    try:
        engine = make(tiny)
        engine.start()
        engine.close()
        cache = weakref.ref(engine.core.cache)
        del engine
        assert cache() is None
    finally:
        gc.enable()
