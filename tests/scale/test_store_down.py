"""Changes of the fleet while PostgreSQL is down: an error that names the store, never a 500."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from lockstep.engine.probe import write_probe
from lockstep.models import bundled
from tests.engine.checkpoints import trainer, variant
from tests.scale.postgres_server import postgres_server
from tests.scale.replicas import HEADERS
from tests.scale.test_serve_restarts import serve

CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pause", {}),
    ("resume", {}),
    ("flush_cache", {}),
    ("sessions", {"id": "task"}),
)


async def test_changes_fail_with_a_cause_while_the_store_is_down(tmp_path: Path) -> None:
    weights = variant(bundled("tiny") or Path(), tmp_path / "step-1", seed=1)
    write_probe(trainer(weights), weights, version="step-1")
    update = ("update_weights", {"weight_dir": str(weights)})
    with postgres_server() as server, serve(server.schema_url()) as served:
        base = f"{served['admin_url']}/v1/rl/"
        async with aiohttp.ClientSession(base, headers=HEADERS) as http:

            async def call(route: str, body: dict[str, Any]) -> tuple[int, str]:
                async with http.post(route, json=body) as response:
                    return response.status, await response.text()

            # Calls of every moment: begun before the crash, just after it, and once the gateway has
            # stopped leading.
            begun = [asyncio.create_task(call(*update))]
            await asyncio.to_thread(server.stop, "immediate")
            for _ in range(6):
                begun += [asyncio.create_task(call(*each)) for each in (update, *CALLS)]
                await asyncio.sleep(0.5)
            results = await asyncio.gather(*begun)
            # 502 is an update that had begun, and was undone on all workers.
            refused = [text for status, text in results if status in (502, 503)]
            assert all("store" in text or "lead" in text for text in refused)
            assert {status for status, _ in results} <= {200, 409, 502, 503}, results
            assert len(refused) >= len(begun) // 2
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(60):
                while (await call(*update))[0] != 200:
                    await asyncio.sleep(0.2)
