"""Tells a runtime that has no /health of ours to read whether the engine works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lockstep.engine import Engine

SECONDS = 1.0


async def report_health(
    engine: Engine, report: Callable[[bool], None], seconds: float = SECONDS
) -> None:
    """Calls `report` whenever the engine has become well or ill, until it is cancelled.

    It is taken for well in the beginning.
    """
    was = True
    while True:
        await asyncio.sleep(seconds)
        now = engine.alive and engine.problem is None
        if now != was:
            report(now)
            was = now
