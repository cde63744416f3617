"""What prime-rl's pool, weight watcher and scheduler ask of inference, over real sockets.

prime-rl is no package that could be installed here. These are the calls of its client, its metrics
collector and its adapter sync, with its retries: 5xx and faults for weights, 404 and 500 for
adapters, anything else ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, get_peft_model
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import lockstep
from lockstep.models import bundled
from tests.processes import TOKEN, ServeProcess

TINY = Path(bundled("tiny") or "")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def served(outputs: Path) -> Iterator[ServeProcess]:
    process = ServeProcess(
        "--sessions", "memory", "--workers", "2", "--checkpoint-root", str(outputs), "--single-port"
    )
    yield process
    process.stop()


@pytest_asyncio.fixture
async def admin(served: ServeProcess) -> AsyncIterator[httpx.AsyncClient]:
    """Its admin client: one base URL, one key for everything, no timeout of its own."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    base = f"{served.admin_url}/v1/rl"
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=120) as client:
        yield client


def broadcast(outputs: Path, step: int, scale: float) -> Path:
    """Weights as its filesystem broadcast leaves them: no config, no probe, then STABLE."""
    directory = outputs / "broadcasts" / f"step_{step}"
    directory.mkdir(parents=True)
    weights = {
        name: tensor * scale for name, tensor in load_file(TINY / "model.safetensors").items()
    }
    save_file(weights, directory / "model.safetensors")
    (directory / "STABLE").touch()
    return directory


async def update(admin: httpx.AsyncClient, directory: Path) -> None:
    pause = await admin.post("/pause", params={"mode": "keep", "clear_cache": "false"})
    assert pause.status_code == 200, pause.text
    (directory / "NCCL_READY").touch()
    body = {"weight_dir": directory.as_posix(), "version_uid": None}
    changed = await admin.post("/update_weights", json=body)
    assert changed.status_code == 200, changed.text
    assert (await admin.post("/resume")).status_code == 200


async def test_the_pool_is_ready_and_has_the_model(admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/health")).status_code == 200
    models = (await admin.get("/v1/models")).json()["data"]
    assert "tiny" in [model["id"] for model in models]


async def test_weights_come_by_the_filesystem_while_rollouts_go_on(
    served: ServeProcess, admin: httpx.AsyncClient, outputs: Path
) -> None:
    async with lockstep.connect(served.url) as policy:

        async def roll() -> set[str]:
            (turn,) = await policy.generate("Reverse: 40213", temperature=1.0, max_tokens=16)
            return {span.version for span in turn.versions}

        directory = broadcast(outputs, 1, 1.01)
        during = asyncio.gather(*(roll() for _ in range(16)))
        await update(admin, directory)
        await during
        assert await roll() == {"step_1"}
        # Sent again, as after a lost answer: nothing is loaded a second time.
        await update(admin, directory)
        assert await roll() == {"step_1"}


async def test_the_scheduler_sees_every_engine_under_the_names_it_reads(
    served: ServeProcess, admin: httpx.AsyncClient
) -> None:
    async with lockstep.connect(served.url) as policy:
        await policy.map(["Reverse: 40213"] * 8, max_tokens=16)
    response = await admin.get("/metrics")
    assert response.status_code == 200
    engines: dict[str, dict[str, float]] = {}
    capacity: dict[str, int] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            engine = sample.labels["engine"]
            engines.setdefault(engine, {})[sample.name] = sample.value
            if sample.name == "vllm:cache_config_info":
                sizes = sample.labels["num_gpu_blocks"], sample.labels["block_size"]
                capacity[engine] = int(sizes[0]) * int(sizes[1])
    workers = set(engines) - {"gateway"}
    assert len(workers) == 2
    assert all(capacity[worker] > 1000 for worker in workers)
    for worker in workers:
        load = engines[worker]
        assert load["vllm:num_preemptions_total"] == 0
        assert 0.0 <= load["vllm:kv_cache_usage_perc"] <= 1.0
        assert load["vllm:num_requests_waiting"] == 0
        assert "vllm:prefix_cache_queries_total" in load
    assert sum(engines[worker]["vllm:generation_tokens_total"] for worker in workers) > 8
    assert engines["gateway"]["vllm:num_requests_waiting"] == 0


async def test_an_adapter_that_is_not_there_yet_is_asked_for_again(
    served: ServeProcess, admin: httpx.AsyncClient, outputs: Path
) -> None:
    body = {"lora_name": "policy", "lora_path": str(outputs / "broadcasts" / "step_2")}
    missing = await admin.post("/load_lora_adapter", json=body)
    assert missing.status_code == 404, missing.text
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(body["lora_path"])
    (Path(body["lora_path"]) / "STABLE").touch()
    loaded = await admin.post("/load_lora_adapter", json=body)
    assert loaded.status_code == 200, loaded.text
    cards = {card["id"]: card for card in (await admin.get("/v1/models")).json()["data"]}
    assert cards["policy"]["parent"] == "tiny"
    async with lockstep.connect(served.url, "policy", tokenizer="tiny") as policy:
        (turn,) = await policy.generate("Reverse: 40213", max_tokens=16)
    assert "policy" in turn.versions[0].version
    await admin.post("/v1/unload_lora_adapter", json={"lora_name": "policy"})


async def test_an_elastic_pool_finds_its_adapter_on_the_one_port_that_it_knows(
    served: ServeProcess, outputs: Path
) -> None:
    """Its pool, by the calls: health and model of an address that DNS gave, load the adapter, look
    at /v1/models for the step that is loaded; env workers ask the same route without a key."""
    adapter = outputs / "broadcasts" / "step_7"
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(adapter)
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=120) as server:

        async def loaded() -> dict[str, str]:
            listed = (await server.get("/v1/models")).json()["data"]
            return {card["id"]: card["root"] for card in listed if card.get("parent") == "tiny"}

        assert (await server.get("/health")).status_code == 200
        assert "rollout" not in await loaded()
        body = {"lora_name": "rollout", "lora_path": str(adapter)}
        answer = await server.post("/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        assert Path((await loaded())["rollout"]).name == "step_7"
        # Every server of the pool is told; a fleet that has the adapter does nothing.
        assert (await server.post("/load_lora_adapter", json=body)).status_code == 200
        assert "vllm:num_requests_waiting" in (await server.get("/metrics")).text
        for call in ("/pause", "/resume"):
            assert (await server.post(call)).status_code == 200
        async with httpx.AsyncClient(base_url=served.url) as env_worker:
            listed = (await env_worker.get("/v1/models")).json()["data"]
            assert "rollout" in [card["id"] for card in listed]
            assert str(outputs) not in str(listed)
        async with lockstep.connect(served.url, "rollout", tokenizer="tiny") as policy:
            (turn,) = await policy.generate("Reverse: 40213", max_tokens=16)
        assert "rollout" in turn.versions[0].version
        await server.post("/v1/unload_lora_adapter", json={"lora_name": "rollout"})


@pytest.mark.parametrize("call", ["/load_lora_adapter", "/update_weights", "/pause"])
async def test_the_one_port_changes_nothing_without_the_admin_token(
    served: ServeProcess, call: str
) -> None:
    async with httpx.AsyncClient(base_url=served.url) as stranger:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = await stranger.post(call, json={}, headers=headers)
            assert answer.status_code == 401
            assert "admin token" in answer.json()["error"]["message"]


async def test_a_broadcast_over_nccl_is_an_error_and_the_fleet_serves_on(
    served: ServeProcess, admin: httpx.AsyncClient
) -> None:
    body = {"host": "127.0.0.1", "port": 1, "rank_offset": 0, "inference_world_size": 2,
            "timeout": 1, "quantize_in_weight_transfer": False}  # fmt: skip
    assert (await admin.post("/init_broadcaster", json=body)).status_code >= 400
    async with asyncio.timeout(30):
        while (await admin.get("/ready")).status_code != 200:
            await asyncio.sleep(0.2)
    async with lockstep.connect(served.url) as policy:
        assert await policy.generate("Reverse: 40213", max_tokens=4)
