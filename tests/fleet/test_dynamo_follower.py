"""Workers that a Dynamo deployment lists and that cannot join: log and state say why."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lockstep.backends.dynamo.discovery import DiscoveredWorker, WorkerChange
from lockstep.backends.dynamo.frontend_probe import FrontendProbeAdmin
from lockstep.fleet.dynamo_follower import _Follower
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.state_view import fleet_state

SICK = DiscoveredWorker(
    "7", "http://127.0.0.1:9", "http://127.0.0.1:9", backend="dynamo", ready=False, error="why"
)


def listing(*workers: DiscoveredWorker) -> WorkerChange:
    return WorkerChange(frozenset(workers), frozenset(workers), frozenset())


@pytest.mark.failure_mode("F72")
async def test_a_refused_worker_is_logged_once_and_listed_until_it_joins_or_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Pool()
    async with pool, Fleet(pool) as fleet:
        follower = _Follower(fleet, None, {"transport": "dynamo"})
        for _ in range(2):
            await follower.apply(listing(SICK))
        assert (await fleet_state(fleet))["refused"] == [{"id": "7", "reason": "why"}]
        assert caplog.text.count("worker 7 refused: why") == 1

        await follower.apply(listing(replace(SICK, ready=True, error=None)))
        assert (await fleet_state(fleet))["refused"] == []
        assert [worker.id for worker in fleet.workers] == ["7"]

        await follower.apply(listing(SICK))
        assert fleet.state.refused == {"7": "why"}
        assert fleet.workers == []
        await follower.apply(listing())
        assert fleet.state.refused == {}


async def test_a_worker_that_could_not_join_is_refused_and_tried_again_with_the_next_change() -> (
    None
):
    async def reject(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    # Something must respond at the URL of the worker that has the id, or it would give the id up.
    server = await asyncio.start_server(reject, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = Pool()
    async with server, pool, Fleet(pool) as fleet:
        follower = _Follower(fleet, None, {"transport": "dynamo"})
        worker = replace(SICK, ready=True, error=None)
        await fleet.add(
            f"http://127.0.0.1:{port}", FrontendProbeAdmin(worker), worker_id="7",
            transport="dynamo",
        )  # fmt: skip
        await follower.apply(listing(worker))
        assert "7" in fleet.state.refused
        await fleet.remove("7", drain_seconds=0)
        await follower.apply(WorkerChange(frozenset({worker}), frozenset(), frozenset()))
        assert fleet.state.refused == {}
        assert [one.id for one in fleet.workers] == ["7"]
