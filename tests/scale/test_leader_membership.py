"""Workers that one gateway is told of serve behind all of them, whoever leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.faults.traffic import Reference
from tests.processes import TOKEN, WorkerProcess
from tests.scale.replicas import ReplicaProcess, worker_arguments

OTHER_TOKEN = "another-admin-token"


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerProcess]]:
    made = [WorkerProcess("--max-model-len", "512", token=each) for each in (TOKEN, OTHER_TOKEN)]
    made.append(WorkerProcess("--max-model-len", "512"))
    yield made
    for worker in made:
        worker.stop(9)


async def settled(
    gateways: list[ReplicaProcess], right: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """The states of all gateways, once all are right."""
    async with asyncio.timeout(30):
        while True:
            states = [await each.state() for each in gateways]
            if all(map(right, states)):
                return states
            await asyncio.sleep(0.1)


async def test_workers_come_and_go_through_any_gateway_and_survive_the_leader(
    workers: list[WorkerProcess], store_url: str, tmp_path: Any
) -> None:
    reference = await asyncio.to_thread(Reference, tmp_path)
    with ExitStack() as stack:

        def start(*arguments: str) -> ReplicaProcess:
            gateway = ReplicaProcess(*arguments, store=store_url)
            stack.callback(gateway.process.wait, 10)
            stack.callback(gateway.process.kill)
            return gateway

        first = start(*worker_arguments(workers[:1]))
        await asyncio.to_thread(lambda: first.ready)
        second = start()  # it is told of no worker, and finds those of the store
        await asyncio.to_thread(lambda: second.ready)
        await settled([first, second], lambda state: state["serving"] == 1)

        # Through the one that follows, with a token that only this worker has.
        body = {"url": workers[1].url, "admin_url": workers[1].system_url, "id": "joined"}
        status, added = await second.admin("POST", "workers", {**body, "admin_token": OTHER_TOKEN})
        assert (status, added["id"]) == (201, "joined"), added
        await settled([first, second], lambda state: state["serving"] == 2)

        # One that only a later gateway was given is proposed to the leader.
        third = start(*worker_arguments(workers[2:]))
        await asyncio.to_thread(lambda: third.ready)
        gateways = [first, second, third]
        states = await settled(gateways, lambda state: state["serving"] == 3)
        assert [state["role"] for state in states] == ["leader", "follower", "follower"]

        first.kill()
        await settled(gateways[1:], lambda state: state["leader"] not in (None, first.admin_url))
        status, updated = await third.update(reference.paths["a"], "a")
        assert status == 200, updated
        assert {each["status"] for each in updated["operation"]["workers"].values()} == {"ok"}
        assert len(updated["operation"]["workers"]) == 3

        gone = workers[2].url.partition("://")[2]
        status, _ = await second.admin("DELETE", f"workers/{gone}?drain_seconds=1")
        assert status == 200
        await settled(gateways[1:], lambda state: len(state["workers"]) == 2)
        await asyncio.sleep(2.5)  # nobody brings it back
        states = await settled(gateways[1:], lambda state: state["serving"] == 2)
        for state in states:
            assert sorted(each["id"] for each in state["workers"]) == sorted(
                ["joined", workers[0].url.partition("://")[2]]
            )
            assert (state["version"], OTHER_TOKEN in str(state)) == ("a", False)
