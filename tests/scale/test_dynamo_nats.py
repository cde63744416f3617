"""Dynamo with requests through a real NATS, where it and etcd demand a password."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from lockstep.engine.probe import write_probe
from lockstep.models import bundled
from lockstep.tokens.exit_codes import TRY_AGAIN
from tests.engine.checkpoints import reference, trainer, variant
from tests.scale.dynamo_hosts import (
    REQUEST,
    DynamoHosts,
    Started,
    Watched,
    dynamo_hosts,
    load,
    needs_servers,
)
from tests.scale.two_hosts import two_hosts

pytestmark = [needs_servers, pytest.mark.timeout(300)]
TINY = bundled("tiny") or Path()
PASSWORD = "hunter2-of-etcd-and-nats"


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoHosts]:
    with two_hosts() as hosts:
        with dynamo_hosts(hosts, tmp_path_factory.mktemp("nats"), PASSWORD) as deployment:
            yield deployment


@pytest.fixture(scope="module")
def frontend(dynamo: DynamoHosts) -> Started:
    return dynamo.frontend()


@pytest.fixture(scope="module")
def gateway(dynamo: DynamoHosts, frontend: Started) -> Started:
    workers = dynamo.workers(1)
    frontend.until_ready()
    workers.until_ready()
    return dynamo.gateway(frontend).until_ready()


async def test_weights_are_updated_while_requests_go_through_nats(
    gateway: Started, frontend: Started, tmp_path: Path
) -> None:
    async with aiohttp.ClientSession(frontend.ready["rl_url"]) as http:
        async with http.get("/v1/rl/workers") as got:
            [worker] = (await got.json())["workers"]
    assert list(worker["transport"]) == ["nats_tcp"]
    new = variant(TINY, tmp_path / "step-1", seed=1)
    write_probe(trainer(new), new, version="step-1")
    watched = Watched(gateway)
    async with watched.fleet:
        await watched.until_serving(1)
        async with load(gateway.ready["url"]) as requests:
            await asyncio.sleep(1)
            await watched.fleet.update_weights(str(new))
            await asyncio.sleep(1)
        assert set((await watched.serving()).values()) == {"step-1"}
    assert set(requests.statuses) == {200}
    [choice] = requests.last["choices"]
    ids = [*REQUEST["token_ids"], *choice["token_ids"]]
    scores = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert scores == reference(new, ids)[len(REQUEST["token_ids"]) - 1 :]


def test_the_password_is_shown_nowhere(dynamo: DynamoHosts, gateway: Started) -> None:
    assert gateway.process.poll() is None
    for log in dynamo.directory.glob("*.log"):
        assert PASSWORD not in log.read_text()
    commands = [
        path.read_bytes()
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists() and b"lockstep" in path.read_bytes()
    ]
    assert any(b"gateway" in command for command in commands)
    assert not any(PASSWORD.encode() in one for one in commands if b"--pass" not in one)


def test_nats_that_is_away_is_told_at_once_and_the_code_says_to_try_again(
    dynamo: DynamoHosts,
) -> None:
    here = dynamo.hosts.here
    worker = dynamo.start(
        here, "worker", "tiny", "--runtime", "dynamo", "--discovery", dynamo.etcd.url,
        "--request-plane", f"nats://{here.address}:9", "--advertise", here.address,
    )  # fmt: skip
    assert worker.wait(30) == TRY_AGAIN
    assert f"NATS cannot be reached from this host ({here.address}:9: " in worker.output
