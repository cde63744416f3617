"""Turns whose prompts are ids are recorded in the session that their request names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from lockstep.gateway.sessions.sessions import Sessions
from lockstep.render import Renderer
from tests.gateway.data_gateway import data_gateway
from tests.processes import WorkerProcess

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
CHAT, TOKENS = "/v1/chat/completions", "/v1/chat/completions/tokens"
IDS = [71, 72, 12, 85, 90]
QUESTION = [{"role": "user", "content": "Reverse: 40213"}]


class Gateway:
    """A gateway in front of one worker, and its sessions."""

    def __init__(self, url: str, sessions: Sessions, http: aiohttp.ClientSession) -> None:
        self.url, self.sessions, self.http = url, sessions, http

    async def post(
        self, path: str, session: str, status: int = 200, breaks: str = "fork", **body: Any
    ) -> Any:
        headers = {"x-session-id": session, "x-session-breaks": breaks}
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == status, text
            if not body.get("stream"):
                return json.loads(text)
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            return [json.loads(line) for line in lines[:-1]]

    async def turn(self, path: str, session: str, ids: list[int], **options: Any) -> list[int]:
        """Samples a turn by one of the routes; its ids."""
        options = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **options}
        stream = options.pop("stream", False)
        body: dict[str, Any]
        if path == GENERATE:
            body = {"token_ids": ids, "sampling_params": options, "stream": stream}
        else:
            prompt = {"prompt": ids} if path == COMPLETIONS else {"tokens": ids, "messages": []}
            body = {**prompt, **options, "stream": stream, "return_token_ids": True}
        response = await self.post(path, session, **body)
        chunks = response if stream else [response]
        return [
            token
            for chunk in chunks
            for choice in chunk["choices"]
            for token in choice.get("token_ids") or ()
        ]


@pytest.fixture
def worker(shared_worker: WorkerProcess) -> WorkerProcess:
    return shared_worker


@pytest_asyncio.fixture
async def gateway(worker: WorkerProcess) -> AsyncIterator[Gateway]:
    async with data_gateway(worker.url) as (url, sessions), aiohttp.ClientSession() as http:
        yield Gateway(url, sessions, http)


@pytest.mark.failure_mode("F56")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{}, {"logprobs": 0}], ids=["bare", "scored"])
@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
async def test_turns_of_ids_join_their_session(
    gateway: Gateway, worker: WorkerProcess, path: str, options: dict[str, Any], stream: bool
) -> None:
    name = f"{path.rpartition('/')[2]}-{len(options)}-{stream}"
    first = await gateway.turn(path, name, IDS, stream=stream, **options)
    assert len(first) == 6
    new = [33, 34]
    second = await gateway.turn(path, name, [*IDS, *first, *new], stream=stream, **options)
    (sample,) = await gateway.sessions.samples(name)
    assert sample.token_ids == [*IDS, *first, *new, *second]
    assert sample.sampled_mask == [False] * 5 + [True] * 6 + [False] * 2 + [True] * 6
    _, direct = await worker.generate(IDS, temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    entries = direct["choices"][0]["logprobs"]["content"]
    assert sample.logprobs[5:11] == [entry["logprob"] for entry in entries]
    assert sample.breaks == ()


@pytest.mark.failure_mode("F56")
async def test_a_turn_of_ids_follows_one_of_messages_on_every_route(
    gateway: Gateway, renderer: Renderer
) -> None:
    options = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
    chat = await gateway.post(CHAT, "mixed", messages=QUESTION, **options)
    ids = [*chat["prompt_token_ids"], *chat["choices"][0]["token_ids"]]
    for path in (GENERATE, COMPLETIONS, TOKENS):
        await gateway.turn(path, "mixed", [*ids, 33])
    samples = await gateway.sessions.samples("mixed", dedupe=False)
    assert [sample.token_ids[: len(ids)] for sample in samples] == [ids] * 3
    more = [*QUESTION, chat["choices"][0]["message"], *QUESTION]
    again = await gateway.post(CHAT, "mixed", messages=more, **options)
    assert again["prompt_token_ids"][: len(ids)] == ids
    assert all(sample.breaks == () for sample in await gateway.sessions.samples("mixed"))


@pytest.mark.failure_mode("F56")
async def test_ids_that_claim_what_was_not_sampled_are_a_break(gateway: Gateway) -> None:
    first = await gateway.turn(GENERATE, "claims", IDS)
    other = [*IDS, first[0] + 1, *first[1:], 33]
    error = await gateway.post(
        GENERATE, "claims", 409, breaks="strict", token_ids=other, sampling_params={}
    )
    assert (error["error"]["reason"], error["error"]["cause"]) == ("prefix_break", "edited_history")
    await gateway.turn(GENERATE, "claims", other)
    await gateway.turn(GENERATE, "claims", [90, 91])
    samples = await gateway.sessions.samples("claims")
    assert [sample.breaks for sample in samples] == [(), ("edited_history",), ()]


@pytest.mark.failure_mode("F56")
async def test_every_choice_and_prompt_is_a_branch_and_a_scored_prompt_is_none(
    gateway: Gateway,
) -> None:
    body = {"prompt": [IDS, [33, 34]], "n": 2, "max_tokens": 4, "temperature": 1.0}
    for stream in (False, True):
        await gateway.post(COMPLETIONS, f"many-{stream}", stream=stream, **body)
        samples = await gateway.sessions.samples(f"many-{stream}")
        assert sorted(sum(not one for one in sample.sampled_mask) for sample in samples) == [
            2, 2, 5, 5,
        ]  # fmt: skip
    scoring = {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 0}
    await gateway.post(COMPLETIONS, "scored", **scoring)
    assert "scored" not in [info.id for info in await gateway.sessions.page()]


@pytest.mark.failure_mode("F53")
async def test_a_strict_session_refuses_ids_at_another_temperature(gateway: Gateway) -> None:
    first = await gateway.turn(GENERATE, "strict", IDS)
    error = await gateway.post(
        GENERATE,
        "strict",
        409,
        breaks="strict",
        token_ids=[*IDS, *first, 33],
        sampling_params={"temperature": 1.0},
    )
    assert error["error"]["param"] == "temperature"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load("tiny")
