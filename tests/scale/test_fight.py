"""Two gateways that share nothing are pointed at the same workers: there is no fight."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from time import monotonic

import pytest

from tests.faults.traffic import FIRST, Reference
from tests.fleet.live_fleet import Workers, running
from tests.scale.replicas import ReplicaProcess, worker_arguments

FIGHT_SECONDS = 25.0
"""As long as two gateways were once seen to take the weights from each other."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with running(1) as workers:
        yield workers


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("checkpoints"))


async def held(workers: Workers) -> str:
    _, view = await workers.processes[0].control("liveness_probe")
    return str(view["version"])


@pytest.mark.failure_mode("F61")
async def test_the_later_of_two_gateways_commands_and_the_other_says_so(
    workers: Workers, reference: Reference
) -> None:
    await workers.reset(reference.paths[FIRST])
    apart = ("--state-dir", "memory", "--sessions", "memory")
    first = ReplicaProcess(*worker_arguments(workers.processes), *apart)
    second = first
    try:
        await asyncio.to_thread(lambda: first.ready)
        second = ReplicaProcess(*worker_arguments(workers.processes), *apart)
        await asyncio.to_thread(lambda: second.ready)
        # The one that was there first is told at once, and changes nothing.
        status, body = await first.update(reference.paths["a"], "a")
        assert (status, body["error"]["reason"]) == (409, "superseded"), body
        assert "another gateway" in body["error"]["message"]
        status, body = await second.update(reference.paths["b"], "b")
        assert status == 200, body

        seen: dict[str, Counter[int]] = {"first": Counter(), "second": Counter()}
        versions, changes, before = set(), 0, await held(workers)
        until = monotonic() + FIGHT_SECONDS
        while monotonic() < until:
            for name, gateway in (("first", first), ("second", second)):
                status, answer = await gateway.generate([5, 6, 7])
                seen[name][status] += 1
                if status == 200:
                    versions.add(answer["choices"][0]["weight_versions"][-1]["version"])
            now = await held(workers)
            changes, before = changes + (now != before), now
            await asyncio.sleep(0.1)
        assert (changes, before) == (0, "b")
        assert versions == {"b"}
        assert set(seen["second"]) == {200}
        assert 200 not in seen["first"]
        state = await first.state()
        assert "another gateway" in state["workers"][0]["reason"]
        assert state["superseded"] is True
        assert (await second.state())["superseded"] is False
    finally:
        for gateway in (first, second):
            gateway.process.kill()
            gateway.process.wait(10)
