"""A fleet behind its control plane behaves like the fleet itself: same operations, same errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.fleet.remote import RemoteFleet
from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.app import control_app
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.server.server import listen, serving, url_of
from lockstep.tokens.errors import CheckpointError, Conflict, NotFound, Unavailable, UpdateFailed
from lockstep.tokens.operation import Operation
from tests.simulator.fleet import Simulation, simulated

TOKEN = "admin-token"


@asynccontextmanager
async def remote(directory: Path, count: int = 3) -> AsyncIterator[tuple[Simulation, RemoteFleet]]:
    async def no_models() -> list[Any]:
        return []

    async with simulated(directory, count) as fleet, Sessions() as sessions:
        context = GatewayContext(
            pool=cast(Pool, fleet.pool), models=ModelRegistry(no_models), sessions=sessions
        )
        app = control_app(context, fleet.fleet, TOKEN, hosts=("127.0.0.1",))
        with listen("127.0.0.1", 0) as sock:
            async with serving([(app, sock)]), RemoteFleet(url_of(sock), token=TOKEN) as client:
                yield fleet, client


async def test_changes_return_the_operation_that_the_fleet_recorded(tmp_path: Path) -> None:
    async with remote(tmp_path) as (fleet, client):
        operations = [
            await client.update_weights(fleet.checkpoint("a"), key="k"),
            await client.pause(lease_seconds=60),
            await client.flush(),
            await client.resume(),
        ]
        for operation in operations:
            assert isinstance(operation, Operation)
            assert operation == await fleet.fleet.operations.get(operation.id)
            assert operation == await client.operation(operation.id)
            assert {result.status for result in operation.workers.values()} == {"ok"}
        assert (operations[0].version, operations[0].key) == ("a", "k")
        assert operations[0].pause_seconds is not None
        again = await client.update_weights(fleet.checkpoint("a"), key="k")
        assert again == operations[0]


@pytest.mark.failure_mode("F24")
async def test_a_failed_change_raises_the_error_of_the_fleet(tmp_path: Path) -> None:
    async with remote(tmp_path) as (fleet, client):
        with pytest.raises(NotFound) as missing:
            await client.unload_adapter("none")
        assert missing.value.param == "lora_name"
        assert missing.value.operation is not None
        with pytest.raises(CheckpointError):
            await client.update_weights(tmp_path / "nothing", "b")
        fleet.workers[1].strike("stage", "error")
        with pytest.raises(UpdateFailed) as failed:
            await client.update_weights(fleet.checkpoint("a"), key="k")
        assert failed.value.operation is not None
        assert failed.value.operation.workers["w1"].phase == "stage"
        assert failed.value.operation == await fleet.fleet.operations.get(failed.value.operation.id)
        with pytest.raises(UpdateFailed) as again:  # from the record: the same key never runs twice
            await fleet.fleet.update_weights(fleet.checkpoint("a"), key="k")
        assert (again.value.message, again.value.operation) == (
            failed.value.message,
            failed.value.operation,
        )
        with pytest.raises(Conflict, match="was used for update_weights"):
            await client.pause(key="k")
        fleet.check()


async def test_an_operation_over_no_workers_is_unavailable(tmp_path: Path) -> None:
    async with remote(tmp_path, 0) as (_, client):
        with pytest.raises(Unavailable) as failed:
            await client.pause()
        assert failed.value.operation is not None
