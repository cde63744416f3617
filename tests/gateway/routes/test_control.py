"""The control plane: who may call it, what bodies it takes, and what a failure says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.app import control_app
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.sessions.sessions import Sessions
from tests.simulator.fleet import Simulation, simulated

TOKEN = "admin-token"


@asynccontextmanager
async def control(
    directory: Path, count: int = 3
) -> AsyncIterator[tuple[Simulation, httpx.AsyncClient]]:
    async def no_models() -> list[Any]:
        return []

    async with simulated(directory, count) as fleet, Sessions() as sessions:
        context = GatewayContext(
            pool=cast(Pool, fleet.pool), models=ModelRegistry(no_models), sessions=sessions
        )
        app = control_app(context, fleet.fleet, TOKEN, hosts=("127.0.0.1",))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://127.0.0.1/v1/rl",
            headers={"authorization": f"Bearer {TOKEN}"},
        ) as client:
            yield fleet, client


@pytest.mark.parametrize("url", ["", "  "])
async def test_a_worker_without_a_url_is_the_callers_mistake(tmp_path: Path, url: str) -> None:
    async with control(tmp_path) as (_, client):
        response = await client.post("workers", json={"url": url})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "url")


@pytest.mark.parametrize("kind", [None, "application/json", "application/octet-stream"])
async def test_a_post_without_a_body_needs_no_type(tmp_path: Path, kind: str | None) -> None:
    headers = {"content-length": "0"} | ({"content-type": kind} if kind else {})
    async with control(tmp_path) as (fleet, client):
        for path in ("pause?mode=keep&clear_cache=true", "resume", "flush_cache"):
            response = await client.post(path, headers=headers)
            assert response.status_code == 200, response.text
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
        response = await client.post(path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert fleet.fleet.desired.paused is None


async def test_a_drain_must_end_some_time(tmp_path: Path) -> None:
    async with control(tmp_path) as (fleet, client):
        for seconds in ("nan", "inf", "-1", "soon"):
            response = await client.delete(f"workers/w0?drain_seconds={seconds}")
            assert response.status_code == 400
        assert "w0" in fleet.serving()
        assert (await client.delete("workers/w0")).status_code == 200
        assert (await client.delete("workers/w0")).status_code == 404


@pytest.mark.failure_mode("F24")
async def test_a_failed_update_names_the_worker_and_the_cause(tmp_path: Path) -> None:
    async with control(tmp_path) as (fleet, client):
        fleet.workers[1].strike("stage", "error")
        response = await client.post("update_weights", json={"weight_dir": fleet.checkpoint("a")})
        assert response.status_code == 502
        body = response.json()
        assert body["error"]["reason"] == "update_failed"
        assert "w1" in body["error"]["message"]
        workers = body["operation"]["workers"]
        assert workers["w1"]["phase"] == "stage"
        assert "status error" in workers["w1"]["error"]
        operation = await client.get(f"operations/{body['operation']['id']}")
        assert operation.json() == body["operation"]
        fleet.check()


@pytest.mark.failure_mode("F50")
@pytest.mark.parametrize("label", ["a+b", "a\nb", "\x1b[31m", "[/bold]", "x" * 100_000], ids=ascii)
async def test_a_label_that_could_be_misread_is_refused_before_anything_happens(
    tmp_path: Path, label: str
) -> None:
    async with control(tmp_path) as (fleet, client):
        path = fleet.checkpoint("a")
        calls: list[tuple[str, str, dict[str, Any]]] = [
            ("update_weights", "version", {"weight_dir": path, "version": label}),
            ("load_lora_adapter", "version",
             {"lora_name": "x", "lora_path": path, "version": label}),
            ("load_lora_adapter", "lora_name", {"lora_name": label, "lora_path": path}),
        ]  # fmt: skip
        if len(label) < 10 and "/" not in label:  # a directory's name is a label too
            calls.append(("update_weights", "version", {"weight_dir": str(tmp_path / label)}))
        for route, param, body in calls:
            response = await client.post(route, json=body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param
            assert len(response.text) < 600
        assert (await client.get("state")).json()["operations"] == []


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
