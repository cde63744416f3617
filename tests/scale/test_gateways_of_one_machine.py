"""`lockstep serve --gateways N`: several processes on one port, over one store."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from tests.processes import TOKEN
from tests.scale.postgres_server import PostgresServer, postgres_server
from tests.scale.replicas import HEADERS

SERVE = [sys.executable, "-m", "lockstep", "serve", "tiny", "--json", "--port", "0",
         "--admin-port", "0", "--workers", "1", "--gateways", "2"]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "PG"))}
    return {**clean, "LOCKSTEP_ADMIN_TOKEN": TOKEN, **more}


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="module")
def served(server: PostgresServer) -> Iterator[dict[str, Any]]:
    """Two gateways and a worker; their ready line, and their process as "process"."""
    process = subprocess.Popen(
        SERVE, stdout=subprocess.PIPE, text=True, env=environment(LOCKSTEP_STORE=server.url)
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        yield {**json.loads(line), "process": process}
    finally:
        process.terminate()
        process.wait(60)


async def pids_on(port: int) -> set[int | None]:
    """The processes that listen on the port; None for a socket of one that is being ended, on which
    connections still arrive."""
    done = await asyncio.create_subprocess_exec(
        "ss", "-Hltnp", f"sport = :{port}", stdout=subprocess.PIPE
    )
    lines = (await done.communicate())[0].decode().splitlines()
    found = [re.search(r"pid=(\d+)", line) for line in lines]
    return {None if pid is None else int(pid[1]) for pid in found}


async def both(served: dict[str, Any]) -> set[int]:
    port = int(served["url"].rpartition(":")[2])
    async with asyncio.timeout(90):
        while len(pids := {pid for pid in await pids_on(port) if pid is not None}) < 2:
            await asyncio.sleep(0.3)
    return pids


async def chat(url: str, session: str, messages: list[Any]) -> int:
    """A turn on a connection of its own, so that any of the gateways may take it."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 4, "seed": 1}
    async with aiohttp.ClientSession(headers={"x-session-id": session}) as http:
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            result = await answer.json(content_type=None)
            if answer.status == 200:
                messages.append(result["choices"][0]["message"])
            return answer.status


async def test_sessions_go_on_whichever_process_takes_a_connection(served: dict[str, Any]) -> None:
    await both(served)

    async def talk(name: str) -> None:
        messages: list[Any] = [{"role": "user", "content": "Reverse: 40213"}]
        for _ in range(6):
            assert await chat(served["url"], name, messages) == 200
            messages.append({"role": "user", "content": "more"})

    await asyncio.gather(*(talk(f"s{at}") for at in range(4)))
    async with aiohttp.ClientSession(headers=HEADERS) as http:
        for at in range(4):
            url = f"{served['admin_url']}/v1/rl/sessions/s{at}"
            async with http.get(url) as answer:
                body = await answer.json()
            assert len(body["samples"]) == 1
            assert len(body["samples"][0]["versions"]) == 6


@pytest.mark.parametrize("first", [True, False])
async def test_a_gateway_that_is_killed_is_started_again_and_everything_else_goes_on(
    served: dict[str, Any], first: bool
) -> None:
    pids = await both(served)
    assert served["process"].pid not in pids
    (leading,) = await pids_on(int(served["admin_url"].rpartition(":")[2]))
    victim = leading if first else next(iter(pids - {leading}))
    assert victim is not None
    worker = int(served["workers"][0]["url"].rpartition(":")[2])
    serving = await pids_on(worker)
    os.kill(victim, signal.SIGKILL)
    messages: list[Any] = [{"role": "user", "content": "Reverse: 40213"}]
    async with asyncio.timeout(60):
        while {victim, None} & await pids_on(int(served["url"].rpartition(":")[2])):
            await asyncio.sleep(0.05)
    for _ in range(3):
        assert await chat(served["url"], f"after-{first}", messages) == 200
        messages.append({"role": "user", "content": "more"})
    assert victim not in await both(served)
    assert await pids_on(worker) == serving
    async with asyncio.timeout(60), aiohttp.ClientSession(headers=HEADERS) as http:
        while True:  # the one with the admin port of the ready line is back, or never left
            with suppress(aiohttp.ClientError):
                async with http.get(f"{served['admin_url']}/v1/rl/state") as answer:
                    state = await answer.json()
                    if [one["state"] for one in state["workers"]] == ["serving"]:
                        break
            await asyncio.sleep(0.1)


def test_several_gateways_without_a_store_are_refused() -> None:
    done = subprocess.run(SERVE, capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 2
    assert "--gateways 2 needs a store that gateways can share" in done.stderr
