"""Reports to a runtime when the engine becomes unhealthy and when it recovers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from lockstep.worker.health_report import report_health
from tests.fleet.fakes import until


async def test_health_is_reported_when_it_changes() -> None:
    engine: Any = SimpleNamespace(alive=True, problem=None)
    reports: list[bool] = []
    task = asyncio.create_task(report_health(engine, reports.append, 0.01))
    await asyncio.sleep(0.05)
    assert reports == []
    engine.problem = "its steps fail"
    await until(lambda: reports == [False])
    engine.problem = None
    await until(lambda: reports == [False, True])
    engine.alive = False
    await until(lambda: reports == [False, True, False])
    task.cancel()
