"""An engine whose steps fail: its worker reports it, gets no traffic, and recovers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lockstep.engine import Engine, EngineOptions, EngineRequest, step_health
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Pool
from lockstep.http.server.server import listen, serving, url_of
from lockstep.models import bundled
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import EngineFailure, Unavailable
from lockstep.worker.data import DataPlane
from tests.fleet.fakes import until

TINY = bundled("tiny") or Path()
POISON = 400


class Breakable:
    """A real engine behind a real port, whose forward pass fails while `broken` is set."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.engine, self.url = engine, url
        self.broken = False
        self.steps = 0
        self._forward = engine.core.model.forward
        engine.core.model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, weights: Any, cache: Any, batch: Any) -> Any:
        self.steps += 1
        if self.broken or POISON in batch.ids.tolist():
            raise RuntimeError("device-side assert")
        return self._forward(weights, cache, batch)

    async def health(self) -> int:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/health") as response:
            return response.status

    async def generate(self, *ids: int) -> list[Completion]:
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        return await self.engine.generate(
            EngineRequest(prompt_ids=list(ids or (5, 6)), sampling=sampling)
        )


@asynccontextmanager
async def breakable() -> AsyncIterator[Breakable]:
    async with Engine(TINY, EngineOptions(arithmetic="close", max_model_len=256)) as engine:
        with listen("127.0.0.1", 0) as sock:
            async with serving([(DataPlane(engine, "tiny", TINY).app, sock)]):
                yield Breakable(engine, url_of(sock))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_health, "RETRY_SECONDS", 0.2)


async def test_three_failed_steps_make_a_worker_unhealthy_until_it_recovers() -> None:
    async with breakable() as worker:
        await worker.generate()
        worker.broken = True
        for _ in range(3):
            assert await worker.health() == 200
            with pytest.raises(EngineFailure, match="device-side assert"):
                await worker.generate()
        assert await worker.health() == 503
        with pytest.raises(Unavailable, match="restart this worker"):
            await worker.generate()
        with pytest.raises(Unavailable):
            await worker.engine.check(EngineRequest(prompt_ids=[5]))
        with pytest.raises(Unavailable):
            await worker.engine.ping()
        worker.broken = False
        async with asyncio.timeout(10):
            while await worker.health() != 200:
                await asyncio.sleep(0.02)
        assert len((await worker.generate())[0].token_ids) == 4


async def test_a_request_that_breaks_every_step_does_not_make_the_worker_unhealthy() -> None:
    async with breakable() as worker:
        for _ in range(7):
            with pytest.raises(EngineFailure, match="device-side assert"):
                await worker.generate(POISON)
            assert await worker.health() == 200
        assert len((await worker.generate())[0].token_ids) == 4


async def test_a_sleeping_engine_runs_no_canary() -> None:
    async with breakable() as worker:
        await worker.generate()
        steps = worker.steps
        await asyncio.sleep(0.5)
        assert worker.steps == steps


@pytest.mark.failure_mode("F35")
async def test_a_fleet_serves_every_request_while_one_engine_always_fails() -> None:
    request = GenerateRequest(
        prompt_ids=[5, 6, 7], sampling=Sampling(max_tokens=4, ignore_eos=True), model="tiny"
    )
    async with breakable() as bad, breakable() as good, Pool(probe_seconds=0.1) as pool:
        broken = await pool.add(bad.url)
        await pool.add(good.url)
        bad.broken = True
        for number in range(40):
            (completion,) = await pool.run(
                Affinity(session=str(number)), lambda to: to.generate(request)
            )
            assert completion.worker == good.url
        await until(lambda: broken.state == "down")
        assert broken.reason is not None
        steps = bad.steps
        bad.broken = False
        await until(lambda: broken.state == "serving")
        assert bad.steps > steps
