"""A trainer is told when a session has ended: by its budget, by its harness, or by a finish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.test_tenants import Client
from tests.processes import TOKEN, ServeProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Minted:
    """A session with a key of its own, and the control plane's view of it."""

    def __init__(
        self, http: aiohttp.ClientSession, served_gateway: ServeProcess, body: Any
    ) -> None:
        self.agent = Client(http, served_gateway.url, body["key"])
        self._admin = Client(http, served_gateway.admin_url, TOKEN)
        self._path = f"/v1/rl/sessions/{body['id']}"

    async def wait(self, seconds: float) -> dict[str, Any] | None:
        status, info = await self._admin.send(f"{self._path}/wait?seconds={seconds}")
        assert status == 200, info
        ended: dict[str, Any] | None = info["ended"]
        return ended

    async def finish(self, reward: float) -> Any:
        return await self._admin.send(f"{self._path}/finish", {"reward": reward})


@pytest_asyncio.fixture(loop_scope="module")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as http:
        yield http


async def mint(http: aiohttp.ClientSession, served_gateway: ServeProcess, **budget: Any) -> Minted:
    status, body = await Client(http, served_gateway.admin_url, TOKEN).send(
        "/v1/rl/sessions", budget
    )
    assert status == 201, body
    return Minted(http, served_gateway, body)


@pytest.mark.parametrize(
    ("budget", "by", "turns"),
    [({"max_calls": 2}, "calls", 2), ({"max_tokens": 1}, "tokens", 1)],
    ids=["calls", "tokens"],
)
async def test_whoever_waits_is_told_at_once_that_the_budget_is_used(
    http: aiohttp.ClientSession,
    served_gateway: ServeProcess,
    budget: dict[str, int],
    by: str,
    turns: int,
) -> None:
    session = await mint(http, served_gateway, **budget)
    assert await session.wait(0) is None
    waiting = asyncio.create_task(session.wait(60))
    for _ in range(turns):
        assert not waiting.done()
        assert (await session.agent.chat())[0] == 200
    ended = await asyncio.wait_for(waiting, 5)
    assert ended is not None
    assert (ended["by"], ended["reward"]) == (by, None)
    assert abs(ended["at"] - time.time()) < 60
    assert (await session.agent.chat())[0] == 403
    # A reward may follow, and what ended it first stands.
    assert (await session.finish(0.5))[1]["ended"] == {**ended, "reward": 0.5}


async def test_time_that_has_run_out_ends_a_session(
    http: aiohttp.ClientSession, served_gateway: ServeProcess
) -> None:
    session = await mint(http, served_gateway, seconds=0.5)
    ended = await session.wait(60)
    assert ended is not None
    assert ended["by"] == "seconds"


async def test_a_harness_ends_its_session_and_cannot_give_the_reward(
    http: aiohttp.ClientSession, served_gateway: ServeProcess
) -> None:
    session = await mint(http, served_gateway)
    assert (await session.agent.chat())[0] == 200
    waiting = asyncio.create_task(session.wait(60))
    assert (await session.agent.send("/v1/session/finish", {"reward": 1.0}))[0] == 400
    assert (await session.agent.send("/v1/session/finish", verb="POST"))[0] == 200
    ended = await asyncio.wait_for(waiting, 5)
    assert ended is not None
    assert (ended["by"], ended["reward"]) == ("harness", None)
    assert (await session.agent.chat())[0] == 403
    assert (await session.finish(0.25))[1]["ended"]["reward"] == 0.25


async def test_a_finish_is_an_end_with_its_reward(
    http: aiohttp.ClientSession, served_gateway: ServeProcess
) -> None:
    session = await mint(http, served_gateway)
    waiting = asyncio.create_task(session.wait(60))
    await asyncio.sleep(0.1)
    await session.finish(1.0)
    ended = await asyncio.wait_for(waiting, 5)
    assert ended is not None
    assert (ended["by"], ended["reward"]) == ("finish", 1.0)


async def test_without_an_end_the_wait_ends_by_itself_and_a_session_that_is_gone_is_said(
    http: aiohttp.ClientSession, served_gateway: ServeProcess
) -> None:
    session = await mint(http, served_gateway)
    assert await session.wait(0.2) is None
    admin = Client(http, served_gateway.admin_url, TOKEN)
    assert (await admin.send("/v1/rl/sessions/nobody/wait?seconds=1"))[0] == 404
    for bad in ("-1", "nan", "400", "x"):
        assert (await admin.send(f"/v1/rl/sessions/nobody/wait?seconds={bad}"))[0] == 400
    # Without a key of its own a caller has no session to end.
    anybody = Client(http, served_gateway.url, None)
    assert (await anybody.send("/v1/session/finish", verb="POST"))[0] == 403
