"""Errors that well-known clients recognise by their code or wording, on the gateway's routes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from tests.gateway.data_gateway import data_gateway
from tests.processes import WorkerProcess

LIMIT = 128
LONG = [{"role": "user", "content": "far too long " * 100}]
FOUND = {"role": "assistant", "content": "Yes."}
IDS = [1] * LIMIT
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": LONG},
    "/sessions/long/v1/chat/completions": {"messages": LONG},
    "/v1/chat/completions/tokens": {"tokens": IDS, "messages": []},
    "/v1/completions": {"prompt": IDS},
    "/inference/v1/generate": {"token_ids": IDS, "sampling_params": {}},
}


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", str(LIMIT), "--max-num-seqs", "4")
    yield process
    process.stop()


@pytest_asyncio.fixture
async def gateway(worker: WorkerProcess) -> AsyncIterator[str]:
    async with data_gateway(worker.url) as (url, _):
        yield url


@pytest.mark.failure_mode("F52")
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_overlong_prompt_has_openai_s_code_and_vllm_s_words(
    gateway: str, path: str, stream: bool
) -> None:
    async with aiohttp.ClientSession() as http:
        body = {**BODIES[path], "stream": stream}
        async with http.post(gateway + path, json=body) as response:
            assert response.status == 400
            error = json.loads(await response.text())["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["reason"] == "prompt_too_long"
    assert f"This model's maximum context length is {LIMIT} tokens" in error["message"]
    assert "reduce the length of the messages" in error["message"]


@pytest.mark.parametrize("words", [20, 100])
async def test_a_first_prompt_that_is_too_long_names_the_harness(gateway: str, words: int) -> None:
    """Counted whole, and given up on after more text than can fit."""
    messages = [{"role": "user", "content": "far too long " * words}]
    for history, named in ((messages, True), ([*messages, FOUND, *messages], False)):
        async with aiohttp.ClientSession(headers={"x-codex-window-id": "w"}) as http:
            url = f"{gateway}/v1/chat/completions"
            async with http.post(url, json={"messages": history}) as response:
                message = json.loads(await response.text())["error"]["message"]
        assert f"maximum context length is {LIMIT} tokens" in message
        # A later prompt can be made shorter, which agents do by themselves.
        assert ("the first prompt of codex: serve a model with a longer" in message) == named


@pytest.mark.failure_mode("F52")
async def test_openai_s_client_reads_the_code(gateway: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(model="tiny", messages=LONG)  # type: ignore[arg-type]
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(
            model="gpt-9", messages=[{"role": "user", "content": "Hi"}]
        )
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.models.retrieve("gpt-9")
    assert unknown.value.code == "model_not_found"
    await client.close()


async def test_openai_s_client_does_not_retry_a_conflict(gateway: str) -> None:
    headers = {"x-session-id": "once", "x-session-breaks": "strict"}
    client = openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="none", default_headers=headers)
    history: list[Any] = [{"role": "user", "content": "Hi"}]
    first = await client.chat.completions.create(model="tiny", messages=history, max_tokens=2)
    more = [*history, first.choices[0].message, *history]
    with pytest.raises(openai.ConflictError) as caught:
        await client.chat.completions.create(model="tiny", messages=more, temperature=0.5)
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
    await client.close()
