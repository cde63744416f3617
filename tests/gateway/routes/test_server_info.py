"""What trainers ask a vLLM server, answered in its shape: TRL's client reads these fields."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from lockstep.render import Renderer
from tests.gateway.data_gateway import data_gateway
from tests.processes import WorkerProcess

QUESTION = [{"role": "user", "content": "Reverse: 40213"}]


@pytest.fixture
def worker(shared_worker: WorkerProcess) -> WorkerProcess:
    return shared_worker


@pytest_asyncio.fixture
async def http(worker: WorkerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        data_gateway(worker.url) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


async def test_server_info_has_vllm_s_shape(http: httpx.AsyncClient) -> None:
    response = await http.get("/server_info", params={"config_format": "json"})
    config = response.json()["vllm_config"]
    assert config["model_config"] == {
        "model": "tiny",
        "max_model_len": 1024,
        "dtype": "torch.float32",
        "logprobs_mode": "processed_logprobs",
    }
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["lora_config"] is None
    assert config["weight_transfer_config"] is None
    assert (await http.get("/get_world_size")).json() == {"world_size": 1}
    assert (await http.post("/reset_prefix_cache")).json() == {"success": True}
    text = await http.get("/server_info", params={"config_format": "text"})
    assert text.json()["error"]["param"] == "config_format"


@pytest.mark.exact_arithmetic
async def test_a_rendered_chat_samples_what_the_chat_samples(http: httpx.AsyncClient) -> None:
    chat = {"model": "tiny", "messages": QUESTION, "seed": 3, "max_tokens": 6, "logprobs": True,
            "return_token_ids": True}  # fmt: skip
    rendered = (await http.post("/v1/chat/completions/render", json=chat)).json()
    assert rendered["token_ids"] == Renderer.load("tiny").render(QUESTION)
    assert rendered["features"] is None
    for path in ("", "/sessions/rendered"):
        generated = (await http.post(f"{path}/inference/v1/generate", json=rendered)).json()
        answered = (await http.post("/v1/chat/completions", json=chat)).json()
        (mine,), (theirs,) = generated["choices"], answered["choices"]
        assert mine["token_ids"] == theirs["token_ids"]
        assert [entry["logprob"] for entry in mine["logprobs"]["content"]] == [
            entry["logprob"] for entry in theirs["logprobs"]["content"]
        ]
