"""The control plane: who may call it, what bodies it takes, and what a failure says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from lockstep.fleet.pool import Pool
from lockstep.gateway.book import Book
from lockstep.gateway.control import ControlPlane
from lockstep.gateway.gateway import Gateway
from lockstep.gateway.sessions import Sessions
from tests.fleet.simulated import Simulation, simulated

TOKEN = "admin-token"


@asynccontextmanager
async def control(
    directory: Path, count: int = 3
) -> AsyncIterator[tuple[Simulation, httpx.AsyncClient]]:
    async def no_models() -> list[Any]:
        return []

    async with simulated(directory, count) as fleet, Sessions("memory") as sessions:
        gateway = Gateway(pool=cast(Pool, fleet.pool), book=Book(no_models), sessions=sessions)
        app = ControlPlane(gateway, fleet.fleet, TOKEN, hosts=("127.0.0.1",)).app
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://127.0.0.1/v1/rl",
            headers={"authorization": f"Bearer {TOKEN}"},
        ) as client:
            yield fleet, client


@pytest.mark.parametrize("kind", [None, "application/json", "application/octet-stream"])
async def test_a_post_without_a_body_needs_no_type(tmp_path: Path, kind: str | None) -> None:
    headers = {"content-length": "0"} | ({"content-type": kind} if kind else {})
    async with control(tmp_path) as (fleet, client):
        for path in ("pause?mode=keep&clear_cache=true", "resume", "flush_cache"):
            answer = await client.post(path, headers=headers)
            assert answer.status_code == 200, answer.text
        assert fleet.workers[0].calls["flush"] == 2


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("pause?mode=sleep", "mode"),
        ("pause?lease_seconds=nan", "lease_seconds"),
        ("pause?lease_seconds=inf", "lease_seconds"),
        ("pause?lease_seconds=-1", "lease_seconds"),
        ("pause?lease_seconds=0", "lease_seconds"),
        ("pause?until=tomorrow", "until"),
    ],
)
async def test_a_pause_that_makes_no_sense_is_refused(
    tmp_path: Path, path: str, param: str
) -> None:
    async with control(tmp_path) as (fleet, client):
        answer = await client.post(path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert fleet.fleet.desired.paused is None


async def test_a_drain_must_end_some_time(tmp_path: Path) -> None:
    async with control(tmp_path) as (fleet, client):
        for seconds in ("nan", "inf", "-1", "soon"):
            answer = await client.delete(f"workers/w0?drain_seconds={seconds}")
            assert answer.status_code == 400
        assert "w0" in fleet.serving()
        assert (await client.delete("workers/w0")).status_code == 200
        assert (await client.delete("workers/w0")).status_code == 404


@pytest.mark.failure_mode("F24")
async def test_a_failed_update_says_who_failed_and_why(tmp_path: Path) -> None:
    async with control(tmp_path) as (fleet, client):
        fleet.workers[1].strike("stage", "error")
        answer = await client.post("update_weights", json={"weight_dir": fleet.checkpoint("a")})
        assert answer.status_code == 502
        body = answer.json()
        assert body["error"]["reason"] == "update_failed"
        assert "w1" in body["error"]["message"]
        workers = body["operation"]["workers"]
        assert workers["w1"]["phase"] == "stage"
        assert "status error" in workers["w1"]["error"]
        found = await client.get(f"operations/{body['operation']['id']}")
        assert found.json() == body["operation"]
        fleet.check()


@pytest.mark.failure_mode("F42")
async def test_no_view_changes_anything_and_no_change_is_a_get(tmp_path: Path) -> None:
    async with control(tmp_path) as (fleet, client):
        before = fleet.fleet.desired
        for view in ("state", "health", "ready", "weight_version", "workers"):
            assert (await client.get(view)).status_code == 200
            assert (await client.get(view, headers={"host": "evil"})).status_code == 403
            assert (await client.get(view, headers={"authorization": "no"})).status_code == 401
        for change in ("pause", "resume", "flush_cache", "update_weights", "init_broadcaster"):
            assert (await client.get(change)).status_code == 405
        assert fleet.fleet.desired == before
        assert (await client.get("operations/none")).status_code == 404
