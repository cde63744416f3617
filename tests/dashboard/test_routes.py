"""The dashboard's routes: who may read them, what they can change (nothing), and what they send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from lockstep.dashboard.app import Dashboard
from lockstep.dashboard.static_files import INDEX, read_static
from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.app import control_app
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.metrics import GatewayMetrics
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.server.server import listen, serving, url_of
from tests.simulator.fleet import Simulation, simulated

TOKEN = "admin-token"
BEARER = {"authorization": f"Bearer {TOKEN}"}
DATA = ("events", "data/sessions", "data/sessions/none", "data/run", "data/run/samples",
        "data/sessions/none/branches/0", "data/sessions/none/branches/0/tokens",
        "data/sessions/none/breaks/0")  # fmt: skip
MUTATIONS = ("pause", "resume", "flush_cache", "update_weights", "sessions")


class Served:
    """A control plane with a dashboard, on a real socket."""

    def __init__(self, fleet: Simulation, client: httpx.AsyncClient, stop: asyncio.Event) -> None:
        self.fleet, self.client, self.stop = fleet, client, stop

    async def log_in(self) -> None:
        (await self.client.post("/dashboard/login", json={"token": TOKEN})).raise_for_status()


@asynccontextmanager
async def served(directory: Path, *, run_dir: Path | None = None) -> AsyncIterator[Served]:
    async def no_models() -> list[Any]:
        return []

    stop = asyncio.Event()
    async with simulated(directory, 2) as fleet, Sessions() as sessions:
        context = GatewayContext(
            pool=cast(Pool, fleet.pool), models=ModelRegistry(no_models), sessions=sessions
        )
        dashboard = Dashboard(
            context, fleet.fleet, GatewayMetrics(context), token=TOKEN, stop=stop, run_dir=run_dir
        )
        app = control_app(context, fleet.fleet, TOKEN, hosts=("127.0.0.1",), dashboard=dashboard)
        with listen("127.0.0.1", 0) as sock:
            async with serving([(app, sock)], drain_seconds=5):
                async with httpx.AsyncClient(base_url=url_of(sock), timeout=10) as client:
                    yield Served(fleet, client, stop)
                    stop.set()


@pytest.mark.parametrize("path", DATA)
async def test_nothing_is_read_without_a_login(tmp_path: Path, path: str) -> None:
    async with served(tmp_path) as here:
        answer = await here.client.get(f"/dashboard/{path}")
        assert answer.status_code == 401
        wrong = {"authorization": "Bearer wrong"}
        assert (await here.client.get(f"/dashboard/{path}", headers=wrong)).status_code == 401
        forged = {"cookie": f"lockstep_{here.client.base_url.port}=a.9999999999.{'0' * 64}"}
        assert (await here.client.get(f"/dashboard/{path}", headers=forged)).status_code == 401


async def test_the_cookie_opens_the_dashboard_and_no_other_route(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        await here.log_in()
        assert (await here.client.get("/dashboard/data/sessions")).status_code == 200
        for path in ("state", "workers", "sessions"):
            assert (await here.client.get(f"/v1/rl/{path}")).status_code == 401
        for path in MUTATIONS:
            assert (await here.client.post(f"/v1/rl/{path}", json={})).status_code == 401
        for path in ("codes", "run"):
            assert (await here.client.post(f"/dashboard/{path}", json={})).status_code == 401
        assert here.fleet.fleet.desired.paused is None


async def test_a_page_of_another_site_may_neither_log_in_nor_read(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        await here.log_in()
        evil = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
        for answer in (
            await here.client.post("/dashboard/login", json={"token": TOKEN}, headers=evil),
            await here.client.post("/dashboard/logout", headers=evil),
            await here.client.get("/dashboard/data/sessions", headers=evil),
            await here.client.get("/dashboard/data/sessions", headers={"host": "evil.example"}),
        ):
            assert answer.status_code == 403
        assert (await here.client.get("/dashboard/data/sessions")).status_code == 200


async def test_a_login_by_form_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        answer = await here.client.post("/dashboard/login", data={"token": TOKEN})
        assert answer.status_code == 400


async def test_the_page_may_run_its_own_scripts_only_and_be_framed_by_nobody(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as here:
        page = await here.client.get("/dashboard")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert "http" not in policy
        again = await here.client.get("/dashboard", headers={"if-none-match": page.headers["etag"]})
        assert again.status_code == 304
        for path in ("../app.py", "..%2fapp.py", "app.py", "%2e%2e/app.py"):
            answer = await here.client.get(f"/dashboard/static/{path}", headers=BEARER)
            assert answer.status_code == 404


def test_the_page_is_small_and_names_no_other_host() -> None:
    files = read_static()
    assert INDEX in files
    assert sum(len(file.data) for file in files.values()) < 300_000
    for name, file in files.items():
        text = file.data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in "".join(part for part in text.split() if "http" in part), name
        assert " style=" not in text, f"{name} needs an unsafe policy"


async def events(client: httpx.AsyncClient, count: int) -> list[dict[str, Any]]:
    """The first events of the stream."""
    found: list[dict[str, Any]] = []
    async with client.stream("GET", "/dashboard/events", headers=BEARER) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if len(found) == count:
                    break
    return found


async def test_the_first_event_has_everything_and_the_next_what_changed(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        here.fleet.fleet.workers[1].gpus = ("2", "3")
        watching = asyncio.create_task(events(here.client, 3))
        await asyncio.sleep(0.8)
        here.fleet.fleet.state.quarantine(here.fleet.fleet.workers[0], "for this test")
        first, *later = await asyncio.wait_for(watching, 10)
        assert set(first) == {"at", "fleet", "workers", "health", "run"}  # no operation yet
        assert [row["gpus"] for row in first["workers"].values()] == [[], ["2", "3"]]
        changed = [row for event in later for row in event.get("workers", {}).values()]
        name = here.fleet.fleet.workers[0].id
        assert [row["id"] for row in changed] == [name] * len(changed)
        assert changed[0]["state"] == "quarantined"
        assert changed[0]["reason"] == "for this test"


async def test_a_logout_ends_the_stream(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        await here.log_in()
        cookies = dict(here.client.cookies)
        async with here.client.stream("GET", "/dashboard/events") as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            await here.client.post("/dashboard/logout")
            async with asyncio.timeout(30):
                assert "event: logout" in [line async for line in lines]
        here.client.cookies.update(cookies)
        assert (await here.client.get("/dashboard/data/sessions")).status_code == 401


async def test_a_gateway_that_stops_does_not_wait_for_open_pages(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        async with here.client.stream("GET", "/dashboard/events", headers=BEARER) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            here.stop.set()
            async with asyncio.timeout(2):
                async for _ in lines:
                    pass


async def test_a_run_is_attached_by_the_token_only(tmp_path: Path) -> None:
    from tests.train.demo.test_report import write_run

    run = write_run(tmp_path / "run", steps=4)
    async with served(tmp_path / "fleet") as here:
        await here.log_in()
        assert (await here.client.get("/dashboard/data/run")).status_code == 404
        body = {"directory": str(run)}
        assert (await here.client.post("/dashboard/run", json=body)).status_code == 401
        assert (await here.client.post("/dashboard/run", json=body, headers=BEARER)).is_success
        shown = (await here.client.get("/dashboard/data/run")).json()
        assert shown["curves"]["steps"] == [1, 2, 3, 4]
        samples = (await here.client.get("/dashboard/data/run/samples?step=2")).json()
        assert {sample["step"] for sample in samples["samples"]} == {2}
        wrong = {"directory": str(tmp_path / "nowhere")}
        answer = await here.client.post("/dashboard/run", json=wrong, headers=BEARER)
        assert answer.status_code == 400
