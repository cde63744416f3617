"""Clients that people already have, pointed at the gateway without a change."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from openai import AsyncOpenAI

import lockstep
from tests.processes import TOKEN, ServeProcess

CALC: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def curl(*arguments: str) -> Any:
    result = subprocess.run(
        ["curl", "-s", *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(result.stdout)


def test_curl(served: ServeProcess) -> None:
    header = ("-H", "content-type: application/json")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Reverse: 40213"}]}
    chat = curl(f"{served.url}/v1/chat/completions", *header, "-d", json.dumps(body))
    assert chat["choices"][0]["message"]["content"]
    ids = curl(f"{served.url}/tokenize", *header, "-d", '{"prompt": "Reverse: 40213"}')["tokens"]
    raw = {"token_ids": ids, "sampling_params": {"max_tokens": 2, "logprobs": 0}}
    result = curl(f"{served.url}/inference/v1/generate", *header, "-d", json.dumps(raw))
    assert result["choices"][0]["weight_versions"][0]["version"] == "default"
    assert curl(f"{served.url}/v1/models")["data"][0]["max_model_len"] == 1024


async def test_the_openai_sdk(served: ServeProcess) -> None:
    client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "Reverse: 40213"}]
    whole = await client.chat.completions.create(
        model="tiny", messages=messages, n=2, logprobs=True, top_logprobs=2, seed=1, max_tokens=20
    )
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, seed=1, max_tokens=20, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    reply = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert reply == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    completion = await client.completions.create(model="tiny", prompt="Reverse: 1", max_tokens=3)
    assert completion.choices[0].text is not None
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_stock_renderers_client(served: ServeProcess) -> None:
    from renderers import create_renderer
    from renderers.client import generate
    from renderers.configs import Qwen3RendererConfig
    from transformers import AutoTokenizer

    from lockstep.models import bundled

    tokenizer = AutoTokenizer.from_pretrained(bundled("tiny"))
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    result = await generate(
        client=client,
        renderer=renderer,
        messages=[{"role": "user", "content": "Reverse: 40213"}],
        model="tiny",
        sampling_params={"temperature": 1.0, "max_tokens": 20, "seed": 3},
        cache_salt="7",
        extra_headers={"X-Session-ID": "stock"},
    )
    assert len(result["completion_ids"]) == len(result["completion_logprobs"]) > 0
    ids = result["prompt_ids"] + result["completion_ids"]
    async with lockstep.connect(served.url) as policy:
        scores = await policy.score(ids)
    assert scores.logprobs[len(result["prompt_ids"]) :] == result["completion_logprobs"]


async def test_an_agent_that_can_only_change_its_base_url(served: ServeProcess) -> None:
    """A tool loop of the OpenAI SDK becomes a session, and the session becomes a sample."""
    client = AsyncOpenAI(base_url=f"{served.url}/sessions/agent-1/v1", api_key="none")
    for seed in range(60):
        messages: list[Any] = [{"role": "user", "content": "What is 417 + 86?"}]
        agent = client.with_options(default_headers={})
        first = await agent.chat.completions.create(
            model="tiny", messages=messages, tools=[CALC], seed=seed, max_tokens=64
        )
        if first.choices[0].finish_reason == "tool_calls":
            break
    reply = first.choices[0].message
    assert reply.tool_calls
    messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "503"}]
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=messages, tools=[CALC], max_tokens=64
    )
    assert raw.headers["x-lockstep-bridged"] == "true"
    async with lockstep.connect(served.url) as policy:
        from lockstep.fleet.remote import RemoteFleet

        async with RemoteFleet(served.admin_url, token=TOKEN) as fleet:
            samples = await fleet.samples("agent-1")
            longest = max(samples, key=lambda sample: sum(sample.sampled_mask))
            scores = await policy.score(longest.token_ids)
            await fleet.end_session("agent-1")
    pairs = zip(longest.logprobs, scores.logprobs, longest.sampled_mask, strict=True)
    assert all(mine == theirs for mine, theirs, sampled in pairs if sampled)


@pytest.mark.failure_mode("F42")
async def test_admin_routes_need_the_admin_token_and_are_not_on_the_data_port(
    served: ServeProcess,
) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer nope"}, 401),
            ({"authorization": f"Bearer {TOKEN}", "host": "evil.example"}, 403),
            ({"authorization": f"Bearer {TOKEN}"}, 404),
        ):
            url = f"{served.admin_url}/v1/rl/sessions/unknown"
            async with session.get(url, headers=headers) as response:
                assert response.status == status
        async with session.get(f"{served.url}/v1/rl/state") as response:
            assert response.status == 404
        async with session.get(served.url + "/v1/models", headers={"host": "evil.example"}) as bad:
            assert bad.status == 403
