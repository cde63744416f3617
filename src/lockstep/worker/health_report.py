"""Health reports of the engine to a runtime that does not poll the worker's /health route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lockstep.engine import Engine

SECONDS = 1.0


async def report_health(
    engine: Engine, report: Callable[[bool], None], seconds: float = SECONDS
) -> None:
    """Call `report` whenever the engine becomes healthy or unhealthy, until cancelled.

    The engine counts as healthy at first.
    """
    was_healthy = True
    while True:
        await asyncio.sleep(seconds)
        is_healthy = engine.alive and engine.problem is None
        if is_healthy != was_healthy:
            report(is_healthy)
            was_healthy = is_healthy
