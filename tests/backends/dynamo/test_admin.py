"""DynamoAdmin: only advertised routes, errors with status 200, and a Lockstep engine behind
Dynamo."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.backends.admin import Broadcaster, Source, TensorSpec
from lockstep.backends.dynamo.admin import TRANSACTION, DynamoAdmin
from lockstep.backends.registry import open_admin
from lockstep.tokens.errors import (
    AdapterError,
    BadRequest,
    Conflict,
    ContractError,
    DeadlineExceeded,
    EngineFailure,
    LockstepError,
    Unavailable,
    UnknownModel,
    UnsupportedField,
)
from tests.backends import scripted
from tests.backends.scripted import (
    QUICK,
    Reply,
    Request,
    ScriptedWorker,
    Server,
    serving,
    whole,
)

ROUTES = (
    "liveness_probe", "pause_generation", "resume_generation", "flush_cache",
    "update_weights_from_disk", "update_weights_from_distributed", "init_weights_update_group",
    "get_weight_version", "load_lora", "unload_lora",
)  # fmt: skip
B = Source(directory=Path("/models/b"))
captured = partial(scripted.captured, "dynamo")


@dataclass
class Dynamo(ScriptedWorker):
    """The system server of a dynamo.vllm worker."""

    paused: bool = False
    version: str | None = None
    loads: list[Any] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    hotswap: bool = False

    def key(self, path: str, body: dict[str, Any]) -> str:
        return path.removeprefix("/engine/")

    def respond(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Reply:
        route = path.removeprefix("/engine/")
        if route == "pause_generation":
            self.paused = True
            return whole({"status": "ok", "message": "Engine paused", **body})
        if route == "resume_generation":
            self.paused = False
            return captured("engine_resume")
        if route == "liveness_probe":
            return captured("engine_liveness_ok")
        if route == "get_weight_version":
            return whole({"status": "ok", "version": self.version, "version_declared": True})
        if route.startswith("update_weights"):
            if not self.paused:
                return captured("engine_update_unpaused")
            self.loads.append(body)
            self.version = body["weight_version"]
            return whole({"status": "ok", "version": self.version, "version_declared": True})
        if route == "load_lora":
            name = body["lora_name"]
            there = name in self.adapters
            if self.hotswap or not there:
                self.adapters[name] = body["source"]["uri"]
            fields = {"status": "success", "lora_name": name, "lora_id": 7}
            return whole({**fields, "hot_swap": there and self.hotswap})
        if route == "unload_lora":
            if self.adapters.pop(body["lora_name"], None) is None:
                return whole({"status": "error", "message": "LoRA adapter not found"})
            return captured("more_lora_unload")
        if route in ROUTES:
            return whole({"status": "ok"})
        return captured("engine_unknown_route")


def driver(server: Server, routes: tuple[str, ...] = ROUTES) -> DynamoAdmin:
    return DynamoAdmin(server.url, routes, budgets=QUICK, backoff=0.01)


async def test_an_update_is_loaded_at_commit_and_loaded_back() -> None:
    fake = Dynamo()
    async with serving(fake.script) as server:
        admin = driver(server)
        assert (admin.stages, admin.probes_while_paused) == (False, False)
        await admin.stage(B, "B")
        with pytest.raises(Conflict, match="must be paused"):
            await admin.commit("B")
        await admin.resume()  # nothing was begun, so nothing forbids it
        await admin.pause("keep")
        await admin.commit("B")
        assert fake.loads == [{"model_path": "/models/b", "weight_version": "B"}]
        assert (await admin.view()).version == "B"
        with pytest.raises(Conflict, match="nothing to roll back"):
            await admin.rollback()
        await admin.stage(Source(directory=Path("/models/c")), "C")
        await admin.commit("C")
        assert await admin.rollback() == "B"
        assert fake.loads[-1]["model_path"] == "/models/b"
        await admin.resume()
        await admin.close()


async def test_a_broadcast_names_its_tensors() -> None:
    fake = Dynamo()
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.join_group(Broadcaster("h", 9, rank=1, world_size=2))
        await admin.pause("keep")
        tensors = [TensorSpec("n", "bfloat16", (2, 3))]
        await admin.stage(Source(group="weights", tensors=tensors), "B")
        fake.replies["update_weights_from_distributed"] = [Reply(fault="reset")]
        with pytest.raises(Unavailable):
            await admin.commit("B")
        (sent,) = fake.loads
        with pytest.raises(Conflict, match="half-loaded"):
            await admin.resume()
        assert (sent["names"], sent["dtypes"], sent["shapes"]) == (["n"], ["bfloat16"], [[2, 3]])
        await admin.close()


async def test_routes_that_are_not_advertised_are_not_called() -> None:
    fake = Dynamo()
    async with serving(fake.script) as server:
        admin = driver(server, ("liveness_probe",))
        calls: dict[str, Callable[[], Any]] = {
            "pause_generation": lambda: admin.pause("keep"),
            "resume_generation": admin.resume,
            "flush_cache": admin.flush,
            "update_weights_from_disk": lambda: admin.stage(B, "B"),
            "probe": lambda: admin.probe([[1, 2]]),
            "load_lora": lambda: admin.load_adapter("a", Path("/l")),
            "unload_lora": lambda: admin.unload_adapter("a"),
            "init_weights_update_group": lambda: admin.join_group(Broadcaster("h", 1, 1, 2)),
        }
        for route, call in calls.items():
            with pytest.raises(UnsupportedField, match=f"'{route}'") as caught:
                await call()
            assert caught.value.param == route
        assert server.requests == []
        assert (await admin.view()).version is None
        await admin.close()


@pytest.mark.failure_mode("F23")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("engine_returns_none", ContractError),
        ("engine_status_error_200", EngineFailure),
        ("engine_exception_500", EngineFailure),
        ("engine_unknown_route", LockstepError),
    ],
)
async def test_a_soft_error_null_or_an_exception_is_a_failure(
    name: str, kind: type[LockstepError]
) -> None:
    fake = Dynamo()
    async with serving(fake.script) as server:
        admin = driver(server)
        calls: dict[str, Callable[[], Any]] = {
            "pause_generation": lambda: admin.pause("keep"),
            "resume_generation": admin.resume,
            "flush_cache": admin.flush,
            "get_weight_version": admin.view,
            "init_weights_update_group": lambda: admin.join_group(Broadcaster("h", 1, 1, 2)),
        }
        for route, call in calls.items():
            fake.replies[route] = [captured(name)]
            with pytest.raises(kind, match=server.url):
                await call()
        await admin.close()


@pytest.mark.failure_mode("F23")
async def test_an_update_that_reports_another_version_is_a_failure() -> None:
    fake = Dynamo(paused=True, replies={"update_weights_from_disk": [captured("engine_update_ok")]})
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.stage(B, "B")
        with pytest.raises(ContractError, match="'42', expected 'B'"):
            await admin.commit("B")
        with pytest.raises(Conflict, match="half-loaded"):
            await admin.resume()
        await admin.close()


@pytest.mark.failure_mode("F25")
async def test_an_update_whose_response_is_lost_is_looked_up() -> None:
    fake = Dynamo(paused=True, replies={"update_weights_from_disk": [Reply(fault="reset")]})
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.stage(B, "B")
        await admin.commit("B")
        assert len(fake.loads) == 1
        await admin.close()


@pytest.mark.failure_mode("F36")
async def test_a_worker_that_hangs_in_pause_costs_a_bounded_time() -> None:
    fake = Dynamo(replies={"pause_generation": [Reply((b"{",), fault="hang")] * 9})
    async with serving(fake.script) as server:
        admin = driver(server)
        with pytest.raises(DeadlineExceeded, match=server.url):
            await admin.pause("wait")
        assert len(server.requests) == 1, "a retry would only wait again"
        await admin.close()


@pytest.mark.failure_mode("F30")
@pytest.mark.parametrize("hotswap", [True, False])
async def test_an_adapter_is_swapped_even_where_a_second_load_does_nothing(hotswap: bool) -> None:
    fake = Dynamo(hotswap=hotswap)
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.load_adapter("ad", Path("/l/1"), "one")
        assert await admin.load_adapter("ad", Path("/l/2"), "two") == "two"
        assert fake.adapters == {"ad": "file:///l/2"}
        assert (await admin.view()).adapters == {"ad": "two"}
        await admin.unload_adapter("ad")
        with pytest.raises(UnknownModel):
            await admin.unload_adapter("ad")
        with pytest.raises(BadRequest, match="absolute"):
            await admin.load_adapter("ad", Path("l"))
        fake.replies["load_lora"] = [captured("more_lora_load_bad")]
        with pytest.raises(AdapterError, match="source"):
            await admin.load_adapter("ad", Path("/l"))
        await admin.close()


# A Lockstep engine behind Dynamo


async def test_a_worker_that_advertises_the_transaction_stages() -> None:
    state = {"version": "A", "staged": None, "state": "paused", "running": 1, "waiting": 2,
             "adapter_labels": {"x": "l"}, "incarnation": "i", "weights_id": "i.1."}  # fmt: skip
    paths: list[str] = []

    def script(request: Request) -> Reply:
        paths.append(request.path)
        route, body = request.path.removeprefix("/engine/"), json.loads(request.body)
        fields: dict[str, Any] = {"status": "ok"}
        if route == "liveness_probe":
            fields |= state
        elif route == "stage":
            fields["staged"] = body["weight_version"]
        elif route in ("commit", "rollback"):
            fields["version"] = body.get("weight_version", "A")
        elif route == "probe":
            fields["logprobs"] = [[-1.0]]
        return whole(fields)

    async with serving(script) as server:
        routes = (*ROUTES, *TRANSACTION)
        admin = await open_admin(server.url, backend="dynamo", routes=routes, budgets=QUICK)
        assert (admin.stages, admin.probes_while_paused) == (True, True)
        await admin.stage(B, "B")
        await admin.commit("B")
        assert await admin.probe([[1, 2]]) == [[-1.0]]
        assert await admin.rollback() == "A"
        view = await admin.view()
        assert (view.version, view.paused, view.in_flight, view.adapters) == (
            "A",
            True,
            3,
            {"x": "l"},
        )
        assert "/engine/update_weights_from_disk" not in paths
        await admin.close()


async def test_auto_recognises_a_dynamo_worker_and_requires_its_routes() -> None:
    for replies in ({}, {"liveness_probe": [captured("engine_unknown_route")]}):
        async with serving(Dynamo(replies=replies).script) as server:
            with pytest.raises(BadRequest, match="routes"):
                await open_admin(server.url, budgets=QUICK)
    async with serving(Dynamo().script) as server:
        admin = await open_admin(server.url, routes=ROUTES, budgets=QUICK)
        assert admin.name == "dynamo"
        await admin.close()
    with pytest.raises(BadRequest, match="'nope'"):
        await open_admin("http://x", backend="nope")  # type: ignore[arg-type]
