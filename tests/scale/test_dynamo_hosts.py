"""Dynamo on a real etcd, on two hosts: what dies, is cut off or is lost, and what comes back.

The tests share one deployment, and each leaves two workers that serve. A cut link and an etcd that
is away both use up the same lease, so other tests stand between them: it has to be renewed.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep.backends.dynamo.discovery import DynamoDiscovery, wait_until_ready
from lockstep.backends.dynamo.transport import pinned_url
from lockstep.engine.probe import write_probe
from lockstep.models import bundled
from lockstep.tokens.errors import UnknownModel
from lockstep.tokens.exit_codes import TRY_AGAIN, WRONG
from tests.engine.checkpoints import reference, trainer, variant
from tests.ports import free_port
from tests.scale.dynamo_hosts import (
    PYTHON,
    REQUEST,
    DynamoHosts,
    Started,
    Watched,
    dynamo_hosts,
    load,
    needs_servers,
)
from tests.scale.two_hosts import Host, Hosts, two_hosts

pytestmark = [needs_servers, pytest.mark.timeout(300)]
TINY = bundled("tiny") or Path()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def dynamo(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoHosts]:
    with dynamo_hosts(hosts, tmp_path_factory.mktemp("dynamo")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def frontend(dynamo: DynamoHosts) -> Started:
    return dynamo.frontend()


@pytest.fixture(scope="module")
def workers(dynamo: DynamoHosts, frontend: Started) -> Started:
    started = dynamo.workers(2)  # beside the frontend, which is waited for first
    frontend.until_ready()
    return started.until_ready()


@pytest.fixture(scope="module")
def gateway(dynamo: DynamoHosts, frontend: Started, workers: Started) -> Started:
    return dynamo.gateway(frontend).until_ready()


@pytest.fixture
async def fleet(gateway: Started) -> AsyncIterator[Watched]:
    watched = Watched(gateway)
    async with watched.fleet:
        await watched.until_serving(2)
        yield watched


def figure(what: str, value: object) -> None:
    """Printed with -s, for the table in docs/dynamo.md."""
    print(f"\n  FIGURE {what}: {value}")


async def test_weights_are_updated_on_another_host_and_tokens_are_theirs(
    gateway: Started, fleet: Watched, tmp_path: Path
) -> None:
    new = variant(TINY, tmp_path / "step-1", seed=1)
    write_probe(trainer(new), new, version="step-1")
    begun = time.monotonic()
    operation = await fleet.fleet.update_weights(str(new))
    figure("update", (round(time.monotonic() - begun, 2), operation.pause_seconds))
    assert set((await fleet.serving()).values()) == {"step-1"}
    async with load(gateway.ready["url"]) as requests:
        await asyncio.sleep(1)
    assert set(requests.statuses) == {200}
    [choice] = requests.last["choices"]
    ids = [*REQUEST["token_ids"], *choice["token_ids"]]
    scores = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert scores == reference(new, ids)[len(REQUEST["token_ids"]) - 1 :]


@pytest.mark.failure_mode("F26")
async def test_etcd_that_was_away_for_eight_seconds_is_not_noticed(
    dynamo: DynamoHosts, gateway: Started, fleet: Watched
) -> None:
    before = await fleet.serving()
    async with load(gateway.ready["url"]) as requests:
        dynamo.etcd.kill()
        await asyncio.sleep(8)
        dynamo.etcd.start()
        await asyncio.sleep(2)
    figure("requests", dict(requests.statuses))
    assert set(requests.statuses) == {200}
    assert await fleet.serving() == before


@pytest.mark.failure_mode("F35")
async def test_a_worker_killed_there_costs_no_request_and_its_successor_is_proved_first(
    gateway: Started, workers: Started, fleet: Watched
) -> None:
    victim = workers.ready["workers"][0]
    async with load(gateway.ready["url"]) as requests:
        await asyncio.sleep(1)
        os.kill(victim["pid"], signal.SIGKILL)
        figure("gone after kill -9", await fleet.until_serving(1, victim["instance_id"]))
        figure("successor serves after", await fleet.until_serving(2, victim["instance_id"]))
        await asyncio.sleep(1)
    figure("requests", dict(requests.statuses))
    assert set(requests.statuses) == {200}
    assert set((await fleet.serving()).values()) == {await fleet.version()}
    assert "ended with code -9" in workers.output


async def test_a_second_frontend_needs_to_know_nothing_of_the_first(
    dynamo: DynamoHosts, fleet: Watched
) -> None:
    begun = time.monotonic()
    second = dynamo.frontend().until_ready()
    discovery = DynamoDiscovery(second.ready["url"], second.ready["rl_url"])
    await wait_until_ready(
        discovery, own=frozenset(await fleet.serving()), seconds=60, interval=0.1
    )
    await discovery.close()
    figure("second frontend lists both after", time.monotonic() - begun)
    for name in await fleet.serving():  # pinned: it still knows the one that was killed, too
        url = pinned_url(second.ready["url"], name)
        async with asyncio.timeout(60), lockstep.connect(url, model="tiny") as policy:
            while True:
                try:
                    [completion] = await policy.generate([10, 20], max_tokens=4)
                    break
                except UnknownModel:  # it lists a model before its chat route knows it
                    await asyncio.sleep(0.1)
        assert completion.worker == name
        assert [span.version for span in completion.versions] == [await fleet.version()]
    second.stop()


@pytest.mark.failure_mode("F72")
async def test_a_worker_that_advertises_loopback_is_refused_and_everybody_is_told(
    dynamo: DynamoHosts, hosts: Hosts, gateway: Started, fleet: Watched
) -> None:
    if hosts.link is None:
        pytest.skip("NO NETWORK NAMESPACES HERE: loopback is everybody's")
    silent = dynamo.start(hosts.there, "worker", "tiny", "--runtime", "dynamo", *dynamo.network)
    assert silent.wait(60) == WRONG
    assert f"this host reaches it from {hosts.there.address}" in " ".join(silent.output.split())

    # Told to, it starts: all but etcd might be on its host. The gateway knows better, though it
    # reaches its frontend on loopback, too.
    port = low_port()
    stubborn = loopback_worker(dynamo, hosts.there, "--system-port", port)
    name = stubborn.ready["workers"][0]["instance_id"]
    reason = await refusal(fleet, name)
    assert "its system_url http://127.0.0.1:" in reason
    assert "cannot be reached from here" in reason
    assert f"worker {name} refused: {reason}" in gateway.output
    assert name not in await fleet.serving()

    # The same address is a worker here, which joins; the other is still not taken for it.
    neighbour = loopback_worker(dynamo, hosts.here, "--system-port", port)
    own = neighbour.ready["workers"][0]["instance_id"]
    await fleet.until_serving(3)
    assert own in await fleet.serving()
    assert f"belongs to worker {own} here" in await refusal(fleet, name)
    for started in (stubborn, neighbour):
        started.stop()
    await fleet.until_serving(2, own, name)
    async with asyncio.timeout(30):
        while await fleet.refused():
            await asyncio.sleep(0.1)


def low_port() -> str:
    """A free port that Dynamo takes for its system server: one below 32768."""
    return str(free_port())


def loopback_worker(dynamo: DynamoHosts, host: Host, *arguments: str) -> Started:
    """A worker that advertises loopback, as it was told to."""
    return dynamo.start(
        host, "dynamo", "up", "tiny", "--workers", "1", "--no-frontend", "--json",
        "--python", str(PYTHON), *dynamo.network, "--worker-args", " ".join(arguments),
        DYN_SYSTEM_HOST="127.0.0.1",
    ).until_ready()  # fmt: skip


async def refusal(fleet: Watched, name: str) -> str:
    """Why a worker is refused, once it is; the reason settles within a look or two."""
    async with asyncio.timeout(30):
        while name not in await fleet.refused():
            await asyncio.sleep(0.1)
    await asyncio.sleep(3)
    return (await fleet.refused())[name]


@pytest.mark.failure_mode("F35")
async def test_a_link_that_was_down_for_twelve_seconds_changes_nobody(
    hosts: Hosts, gateway: Started, fleet: Watched
) -> None:
    if hosts.link is None:
        pytest.skip("NO NETWORK NAMESPACES HERE: there is no link to cut")
    before = await fleet.serving()
    async with load(gateway.ready["url"]) as requests:
        begun = time.monotonic()
        with hosts.unplugged():
            figure("fleet is empty after", await fleet.until_serving(0))
            await asyncio.sleep(max(0.0, 12 - (time.monotonic() - begun)))
        figure("serves after the link is back", await fleet.until_serving(2))
        requests.statuses.clear()
        await asyncio.sleep(1)
    assert set(requests.statuses) == {200}
    assert await fleet.serving() == before


@pytest.mark.failure_mode("F73")
async def test_without_etcd_workers_end_with_a_code_to_be_restarted_and_come_back_with_it(
    dynamo: DynamoHosts, gateway: Started, frontend: Started, workers: Started, fleet: Watched
) -> None:
    before = await fleet.serving()
    begun = time.monotonic()
    dynamo.etcd.kill()
    alone = dynamo.start(
        dynamo.hosts.there, "worker", "tiny", "--runtime", "dynamo", *dynamo.network,
        "--advertise", dynamo.hosts.there.address,
    )  # fmt: skip
    assert alone.wait(60) == TRY_AGAIN
    assert "etcd cannot be reached from this host" in " ".join(alone.output.split())
    ended = f"ended with code {TRY_AGAIN}"
    async with asyncio.timeout(90):
        while workers.output.count(ended) < 2 or not re.search("ended with code", frontend.output):
            await asyncio.sleep(0.1)
    figure("workers and frontend have ended after", time.monotonic() - begun)
    async with asyncio.timeout(10):
        while "waiting: etcd cannot be reached" not in workers.output:
            await asyncio.sleep(0.1)
    dynamo.etcd.start()
    figure("serves after etcd is back", await fleet.until_serving(2, *before))
    assert set((await fleet.serving()).values()) == {await fleet.version()}
    async with load(gateway.ready["url"]) as requests:
        await asyncio.sleep(1)
    assert set(requests.statuses) == {200}
