"""Impossible responses of a worker through each route of a gateway: a 502 that names the worker,
and nothing stored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from lockstep.gateway.sessions.sessions import Sessions
from lockstep.tokens import Sample
from lockstep.tokens.errors import NotFound
from tests.check.broken import Fault, broken, per_choice, values_of
from tests.gateway.data_gateway import data_gateway
from tests.processes import WorkerProcess

HELLO = [{"role": "user", "content": "Hello"}]
TOKENS = 6
ROUTES: dict[str, Mapping[str, Any]] = {
    "/inference/v1/generate": {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": TOKENS, "ignore_eos": True},
    },
    "/v1/completions": {"prompt": [1, 2, 3], "max_tokens": TOKENS, "ignore_eos": True},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": TOKENS, "ignore_eos": True},
    "/v1/messages": {"model": "tiny", "messages": HELLO, "max_tokens": TOKENS},
    "/v1/responses": {"model": "tiny", "input": "Hello", "max_output_tokens": TOKENS},
}
CHAT, OUTSIDE = "/v1/chat/completions", "an id outside the vocabulary"
SESSION = {"x-session-id": "task"}


def a_positive_logprob(choice: dict[str, Any]) -> dict[str, Any]:
    """vLLM's form, or a list of numbers."""
    values = values_of(choice)
    if values and isinstance(values[-1], dict):
        values[-1]["logprob"] = 0.5
    elif values:
        values[-1] = 0.5
    return choice


def id_of(token: int) -> Any:
    def change(choice: dict[str, Any]) -> dict[str, Any]:
        if ids := choice.get("token_ids"):
            ids[-1] = token
        return choice

    return change


def repeated(choice: dict[str, Any]) -> dict[str, Any]:
    """More tokens than `max_tokens`."""
    if ids := choice.get("token_ids"):
        ids *= 2 * TOKENS
        values_of(choice)[:] *= 2 * TOKENS
        if ranks := (choice.get("logprobs") or {}).get("ranks"):
            ranks *= 2 * TOKENS
    return choice


def too_few(choice: dict[str, Any]) -> dict[str, Any]:
    """More ids than logprobs."""
    if ids := choice.get("token_ids"):
        ids.append(ids[-1])
    return choice


CHANGES = {
    "a positive logprob": (a_positive_logprob, "logprob 0.5"),
    "an id outside the vocabulary": (id_of(10**7), "token id 10000000"),
    "a negative id": (id_of(-1), "token id -1"),
    "more tokens than max_tokens": (repeated, " tokens, but "),
    "more ids than logprobs": (too_few, "ids"),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", "256", "--max-num-seqs", "4")
    yield process
    process.stop()


@pytest.mark.failure_mode("F76")
@pytest.mark.parametrize(
    ("route", "change"),
    [
        *((route, OUTSIDE) for route in ROUTES),
        *((CHAT, each) for each in CHANGES if each != OUTSIDE),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_the_worker_s_error_and_nothing_is_stored(
    worker: WorkerProcess, route: str, stream: bool, change: str
) -> None:
    broken_choice, says = CHANGES[change]
    fault = Fault(response=per_choice(broken_choice), event=per_choice(broken_choice))
    async with broken(worker.url, fault) as url, data_gateway(url) as (gateway, sessions):
        name = url.removeprefix("http://")
        async with httpx.AsyncClient(base_url=gateway, timeout=60) as http:
            body = {**ROUTES[route], "stream": stream}
            response = await http.post(route, json=body, headers=SESSION)
        assert response.status_code == 502 or stream, response.text
        assert f"worker {name}" in response.text
        assert says in response.text
        assert "10000000" not in delivered(response.text)
        assert await stored(sessions) == []


async def stored(sessions: Sessions) -> list[Sample]:
    try:
        return await sessions.samples("task")
    except NotFound:
        return []


def delivered(text: str) -> str:
    """The events of a stream without its error, and nothing of a whole response."""
    events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return "".join(event for event in events if "impossible" not in json.dumps(event))
