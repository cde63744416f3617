"""The token and call budgets of session keys hold over choices and parallel calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from lockstep.gateway.sessions.sessions import Sessions
from tests.gateway.data_gateway import data_gateway
from tests.processes import WorkerProcess

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def worker(shared_worker: WorkerProcess) -> WorkerProcess:
    return shared_worker


class Client:
    """Requests with the key of one session."""

    def __init__(self, url: str, sessions: Sessions, http: aiohttp.ClientSession) -> None:
        self._url, self.sessions, self._http = url, sessions, http
        self._key = ""

    async def mint(self, **budget: int) -> None:
        self._key, _ = await self.sessions.keys.mint("s", **budget)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        headers = {"authorization": f"Bearer {self._key}"}
        async with self._http.post(self._url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        return await self.post("/v1/chat/completions", {"messages": HI, **fields})


@pytest_asyncio.fixture
async def client(worker: WorkerProcess) -> AsyncIterator[Client]:
    async with data_gateway(worker.url) as (url, sessions), aiohttp.ClientSession() as http:
        yield Client(url, sessions, http)


async def test_choices_share_the_token_budget(client: Client) -> None:
    await client.mint(max_tokens=20)
    status, body = await client.chat(n=4, max_tokens=500, ignore_eos=True)
    assert status == 200, body
    assert body["usage"]["completion_tokens"] == 20
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    status, body = await client.chat(max_tokens=1)
    assert (status, "has used 20 tokens, and its budget is 20" in str(body)) == (403, True)


async def test_parallel_calls_share_the_token_budget(client: Client) -> None:
    await client.mint(max_tokens=60)
    calls = [client.chat(max_tokens=25, ignore_eos=True) for _ in range(15)]
    results = await asyncio.gather(*calls)
    tokens = [body["usage"]["completion_tokens"] for status, body in results if status == 200]
    assert 50 <= sum(tokens) <= 60
    assert {status for status, _ in results} <= {200, 403, 429}
    # A call that failed or was refused has given back what it reserved.
    while sum(tokens) < 60:
        status, body = await client.chat(max_tokens=1, ignore_eos=True)
        assert status == 200, body
        tokens.append(body["usage"]["completion_tokens"])
    assert (await client.chat(max_tokens=1))[0] == 403


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_prompts_of_ids_share_the_token_budget(client: Client, logprobs: int | None) -> None:
    await client.mint(max_tokens=8)
    sampling = {"n": 2, "max_tokens": 500, "ignore_eos": True, "logprobs": logprobs}
    status, body = await client.post(
        "/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": sampling}
    )
    assert status == 200, body
    assert [len(choice["token_ids"]) for choice in body["choices"]] == [4, 4]
    status, _ = await client.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})
    assert status == 403


async def test_every_choice_counts_as_a_call(client: Client) -> None:
    await client.mint(max_calls=5)
    status, body = await client.chat(n=8, max_tokens=1)
    assert (status, "each of n choices counts as a call" in str(body)) == (403, True)
    assert (await client.chat(n=4, max_tokens=1))[0] == 200
    assert (await client.chat(max_tokens=1))[0] == 403


async def test_a_budget_above_the_context_changes_nothing(client: Client) -> None:
    await client.mint(max_tokens=100_000)
    status, body = await client.chat(ignore_eos=True, max_tokens=3)
    assert (status, body["usage"]["completion_tokens"]) == (200, 3)
    status, body = await client.chat()
    assert status == 200, body


async def test_choices_do_not_exceed_the_turns_of_a_session(client: Client) -> None:
    await client.mint()
    limit = 1000
    status, body = await client.chat(n=limit + 1, max_tokens=1)
    assert status in (400, 413), body
