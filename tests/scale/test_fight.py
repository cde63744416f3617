"""Two gateways are pointed at the same workers: there is no fight over the weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import pytest

from tests.engines.dynamo_deployment import Deployment, deployed, needs_dynamo
from tests.faults.traffic import FIRST, Reference
from tests.fleet.live_fleet import Workers, running
from tests.scale.replicas import ReplicaProcess, worker_arguments

APART = ("--state-dir", "memory", "--sessions", "memory")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with running(1) as workers:
        yield workers


@pytest.fixture(scope="module")
def dynamo() -> Iterator[Deployment]:
    with deployed("tiny", 1, "--max-model-len", "512") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("checkpoints"))


@contextmanager
def two(
    *arguments: str, store: str | None = None, **environ: str
) -> Iterator[list[ReplicaProcess]]:
    """Two gateways, of which the second starts when the first is ready."""
    gateways: list[ReplicaProcess] = []
    try:
        for _ in range(2):
            gateways.append(ReplicaProcess(*arguments, store=store, **environ))
            assert gateways[-1].ready
        yield gateways
    finally:
        for gateway in gateways:
            gateway.process.kill()
            gateway.process.wait(10)


async def no_fight(
    first: ReplicaProcess,
    second: ReplicaProcess,
    held: Callable[[], Awaitable[str | None]],
    reference: Reference,
    seconds: float,
) -> None:
    """The second commands, under load on both, and the first says that another one does."""
    # The one that was there first is told at once, and changes nothing.
    status, body = await first.update(reference.paths["a"], "a")
    assert (status, body["error"]["reason"]) == (409, "superseded"), body
    assert "another gateway" in body["error"]["message"]
    status, body = await second.update(reference.paths["b"], "b")
    assert status == 200, body

    seen: dict[str, Counter[int]] = {"first": Counter(), "second": Counter()}
    versions, changes, before = set(), 0, await held()
    until = monotonic() + seconds
    while monotonic() < until:
        for name, gateway in (("first", first), ("second", second)):
            status, answer = await gateway.generate([5, 6, 7])
            seen[name][status] += 1
            if status == 200:
                versions.add(answer["choices"][0]["weight_versions"][-1]["version"])
        now = await held()
        changes, before = changes + (now != before), now
        await asyncio.sleep(0.1)
    assert (changes, before, versions) == (0, "b", {"b"})
    assert set(seen["second"]) == {200}
    assert 200 not in seen["first"]  # it never agreed to what the worker holds
    state = await first.state()
    assert "another gateway" in state["workers"][0]["reason"]
    assert state["superseded"] is True
    assert (await second.state())["superseded"] is False


@pytest.mark.failure_mode("F61")
async def test_the_later_of_two_gateways_commands_and_the_other_says_so(
    workers: Workers, reference: Reference
) -> None:
    await workers.reset(reference.paths[FIRST])

    async def held() -> str | None:
        _, view = await workers.processes[0].control("liveness_probe")
        return str(view["version"])

    with two(*worker_arguments(workers.processes), *APART) as (first, second):
        await no_fight(first, second, held, reference, 10.0)


@needs_dynamo
@pytest.mark.failure_mode("F61")
async def test_two_gateways_on_one_dynamo_deployment_do_not_fight(
    dynamo: Deployment, reference: Reference
) -> None:
    admin = await dynamo.admin()

    async def held() -> str | None:
        return (await admin.view()).version

    environ = {"DYN_RL_PORT": dynamo.rl_url.rpartition(":")[2]}
    with two("--dynamo", dynamo.url, *APART, **environ) as (first, second):
        # As long as two gateways were once seen to take the weights from each other.
        await no_fight(first, second, held, reference, 25.0)
    await admin.close()


@needs_dynamo
async def test_two_gateways_with_one_store_share_a_dynamo_deployment(
    dynamo: Deployment, reference: Reference, store_url: str
) -> None:
    environ = {"DYN_RL_PORT": dynamo.rl_url.rpartition(":")[2]}
    with two("--dynamo", dynamo.url, store=store_url, **environ) as (first, second):
        assert [(await each.state())["role"] for each in (first, second)] == ["leader", "follower"]
        for number, name in enumerate(("a", "b")):
            version = f"shared-{name}"  # the worker may hold one of the names from before
            status, body = await second.update(reference.paths[name], version)
            assert status == 200, body
            for gateway in (first, second)[number:]:
                status, answer = await gateway.generate([5, 6, 7])
                assert status == 200, answer
                assert answer["choices"][0]["weight_versions"][-1]["version"] == version
            if number == 0:
                first.kill()
                async with asyncio.timeout(60):
                    while (await second.state())["role"] != "leader":
                        await asyncio.sleep(0.1)
