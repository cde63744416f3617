"""Helpers for an engine with its thread, and requests that are running during a test."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from lockstep.engine import Engine, EngineOptions
from tests.engine.rig import ids, request

LONG = 900


def make(directory: Path, **options: Any) -> Engine:
    small = {"max_model_len": 1024, "max_seqs": 4, "prefix_cache_bytes": 4 << 20}
    return Engine(directory, EngineOptions(weight_version="v1", **(small | options)))


async def until_running(engine: Engine, count: int = 1) -> None:
    while len(engine.core.scheduler.running) < count:
        await engine.ping()


async def start(engine: Engine, **options: Any) -> asyncio.Task[Any]:
    """Start a long request and return once it is running."""
    before = len(engine.core.scheduler.running)
    task = asyncio.create_task(engine.generate(request(ids(1, 20), max_tokens=LONG, **options)))
    await until_running(engine, before + 1)
    return task


async def score(engine: Engine, token_ids: list[int], *, staged: bool = False) -> list[float]:
    """Return the logprobs of one sequence."""
    (scores,) = await engine.score_all([token_ids], staged=staged)
    return scores
