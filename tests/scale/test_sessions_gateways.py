"""Real gateways on one PostgreSQL: a session may meet any of them in any order."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.processes import WorkerProcess
from tests.scale.postgres_server import PostgresServer, postgres_server
from tests.scale.replicas import HEADERS, ReplicaProcess, worker_arguments


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    worker = WorkerProcess("--port", "0", "--system-port", "0")
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of this module's own, which is stopped."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="module")
def pair(worker: WorkerProcess, server: PostgresServer) -> Iterator[list[ReplicaProcess]]:
    """Two gateways on one store."""
    gateways = [ReplicaProcess(*worker_arguments([worker]), store=server.url) for _ in range(2)]
    try:
        yield [each for each in gateways if each.ready]
    finally:
        _end(gateways)


@pytest.fixture
def alone(worker: WorkerProcess) -> Iterator[ReplicaProcess]:
    """A gateway with sessions of its own."""
    gateway = ReplicaProcess(*worker_arguments([worker]), "--sessions", "memory")
    try:
        yield gateway
    finally:
        _end([gateway])


def _end(gateways: list[ReplicaProcess]) -> None:
    for each in gateways:
        each.process.terminate()
    for each in gateways:
        each.process.wait(60)


async def chat(
    gateway: ReplicaProcess, session: str, messages: list[Any], **more: Any
) -> tuple[int, dict[str, Any]]:
    """Status and body of a turn, which is added to the messages."""
    headers = {"x-session-id": session, **more.pop("headers", {})}
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "seed": len(messages), **more}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{gateway.url}/v1/chat/completions", json=body) as answer:
            result = await answer.json(content_type=None)
            if answer.status == 200:
                messages.append(result["choices"][0]["message"])
            return answer.status, {**result, "bridged": answer.headers.get("x-lockstep-bridged")}


async def samples(gateway: ReplicaProcess, session: str) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession(headers=HEADERS) as http:
        url = f"{gateway.admin_url}/v1/rl/sessions/{session}"
        async with http.get(url) as answer:
            body = await answer.json(content_type=None)
            assert answer.status == 200, body
            return list(body["samples"])


@pytest.mark.failure_mode("F92")
async def test_turns_that_alternate_between_gateways_give_the_samples_of_one(
    pair: list[ReplicaProcess], alone: ReplicaProcess
) -> None:
    async def conversation(gateways: list[ReplicaProcess]) -> list[dict[str, Any]]:
        messages: list[Any] = [{"role": "user", "content": "Reverse: 40213"}]
        for turn in range(6):
            status, body = await chat(gateways[turn % len(gateways)], "alternating", messages)
            assert status == 200, body
            assert body["bridged"] == ("true" if turn else "false")
            messages.append({"role": "user", "content": f"Again: {turn}"})
        return await samples(gateways[-1], "alternating")

    def tokens(samples: list[dict[str, Any]]) -> list[Any]:
        return [(each["token_ids"], each["logprobs"]) for each in samples]

    both = await conversation(pair)
    assert len(both) == 1
    assert both == await samples(pair[0], "alternating")
    assert tokens(await conversation([alone])) == tokens(both)


async def test_concurrent_turns_of_one_session_through_all_gateways_are_all_kept(
    pair: list[ReplicaProcess],
) -> None:
    async def talk(who: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"I am {who}"}]
        for turn in range(4):
            status, body = await chat(pair[(who + turn) % 2], "crowded", messages)
            assert status == 200, body
            messages.append({"role": "user", "content": "more"})

    await asyncio.gather(*(talk(who) for who in range(4)))
    crowd = await samples(pair[0], "crowded")
    assert len(crowd) == 4
    assert all(len(each["versions"]) == 4 for each in crowd)


async def test_a_crash_of_postgresql_loses_no_answered_turn_and_meanwhile_they_are_503(
    pair: list[ReplicaProcess], server: PostgresServer
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Reverse: 40213"}]
    for turn in range(2):
        assert (await chat(pair[turn], "away", messages))[0] == 200
        messages.append({"role": "user", "content": "more"})
    await asyncio.to_thread(server.stop, "immediate")
    for gateway in pair:
        status, body = await chat(gateway, "away", messages)
        assert status == 503
        assert f"the store at 127.0.0.1:{server.port}" in body["error"]["message"]
    await asyncio.to_thread(server.start)
    async with asyncio.timeout(30):
        for turn in range(2):
            while (await chat(pair[turn], "away", messages))[0] != 200:
                await asyncio.sleep(0.1)
            messages.append({"role": "user", "content": "more"})
    (sample,) = await samples(pair[0], "away")
    assert len(sample["versions"]) == 4


async def test_keys_of_the_store_are_added_and_revoked_for_all_gateways(
    pair: list[ReplicaProcess], server: PostgresServer
) -> None:
    assert [await models(each, None) for each in pair] == [200, 200]
    first = keys("add", "alice", "--json", store=server.url)
    await until(pair, None, 401)
    await until(pair, first["key"], 200)
    second = keys("add", "bob", "--prefix", "tml-", "--json", store=server.url)
    assert second["key"].startswith("tml-")
    await until(pair, second["key"], 200)
    keys("revoke", first["id"], store=server.url)
    await until(pair, first["key"], 401)
    assert [each["id"] for each in keys("list", "--json", store=server.url)] == [second["id"]]
    keys("revoke", second["id"], store=server.url)
    await until(pair, second["key"], 401)
    # A store that had keys stays closed when the last one is gone.
    assert [await models(each, None) for each in pair] == [401, 401]


def test_a_store_that_cannot_be_used_is_said_at_the_start(
    worker: WorkerProcess, server: PostgresServer
) -> None:
    gateways = {
        message: ReplicaProcess(*worker_arguments([worker]), store=url)
        for url, message in (
            (f"postgresql://lockstep:hush-hush@127.0.0.1:{server.port}/nowhere", "does not exist"),
            ("postgresql://lockstep:hush-hush@127.0.0.1:1/x", "127.0.0.1:1 is unavailable"),
        )
    }
    for message, gateway in gateways.items():
        with pytest.raises(RuntimeError, match=message) as caught:
            _ = gateway.ready
        assert "hush-hush" not in str(caught.value)


def keys(*arguments: str, store: str) -> Any:
    command = [sys.executable, "-m", "lockstep", "keys", *arguments, "--store", store]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


async def models(gateway: ReplicaProcess, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.get(f"{gateway.url}/v1/models") as answer:
            return answer.status


async def until(gateways: list[ReplicaProcess], key: str | None, status: int) -> None:
    """Waits until every gateway answers so."""
    async with asyncio.timeout(10):
        for gateway in gateways:
            while await models(gateway, key) != status:
                await asyncio.sleep(0.05)
