"""Two hundred agents at once, and a worker that is killed under them: nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import aiohttp
import pytest

import lockstep
from lockstep.fleet.remote import RemoteFleet
from tests.processes import TOKEN, ServeProcess

AGENTS, TURNS = 200, 5


async def agent(
    session: aiohttp.ClientSession, url: str, number: int, finished_turns: list[int]
) -> None:
    """Five turns: a question each, and the tool's result where the model calls it."""
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        calls = messages[-1].get("tool_calls") if messages else None
        if calls:
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "503"}
            messages.append(result)
        else:
            messages.append({"role": "user", "content": f"What is {100 + number} + {turn + 10}?"})
        body = {"model": "tiny", "messages": messages, "max_tokens": 48}
        headers = {"x-session-id": f"agent-{number}"}
        async with session.post(
            f"{url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            read = await response.json()
            assert response.status == 200, read
            assert response.headers["x-lockstep-bridged"] == ("true" if turn else "false")
        messages.append(read["choices"][0]["message"])
        finished_turns.append(number)


@pytest.mark.failure_mode("F35")
@pytest.mark.failure_mode("F44")
async def test_every_sample_of_200_agents_scores_again_while_a_worker_dies(
    served: ServeProcess,
) -> None:
    finished_turns: list[int] = []
    connector = aiohttp.TCPConnector(limit=AGENTS)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with asyncio.TaskGroup() as group:
            for number in range(AGENTS):
                group.create_task(agent(session, served.url, number, finished_turns))
            while len(finished_turns) < AGENTS:
                await asyncio.sleep(0.01)
            os.kill(served.workers[0]["pid"], signal.SIGKILL)
    assert len(finished_turns) == AGENTS * TURNS
    async with RemoteFleet(served.admin_url, token=TOKEN) as fleet:
        samples = [await fleet.samples(f"agent-{number}") for number in range(AGENTS)]
    assert [len(branches) for branches in samples] == [1] * AGENTS
    async with lockstep.connect(served.url) as policy:
        limit = asyncio.Semaphore(32)

        async def check(sample: lockstep.Sample) -> None:
            async with limit:
                scores = await policy.score(sample.token_ids)
            pairs = zip(sample.logprobs, scores.logprobs, sample.sampled_mask, strict=True)
            assert all(mine == theirs for mine, theirs, sampled in pairs if sampled)
            assert sample.breaks == ()

        async with asyncio.TaskGroup() as group:
            for (sample,) in samples:
                group.create_task(check(sample))
    async with aiohttp.ClientSession() as session:
        async with asyncio.timeout(60):
            while True:
                async with session.get(f"{served.url}/health") as response:
                    if (await response.json())["serving"] == 2:
                        return
                await asyncio.sleep(0.05)
