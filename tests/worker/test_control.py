"""The system port over real HTTP: pauses, the weight transaction, adapters, and authentication."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.engine.weights.broadcast import Broadcast
from lockstep.models import bundled
from tests.ports import free_port
from tests.processes import GENERATE, TOKEN, WorkerProcess
from tests.worker.adapters import write_adapter

PROMPT = [11, 29, 3, 77, 5, 140, 9]
Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
async def fresh(worker: WorkerProcess) -> None:
    """Start every test from the bundled weights, unpaused."""
    await worker.control("resume_generation")
    source = bundled("tiny")
    _, body = await worker.control(
        "update_weights_from_disk", model_path=str(source), weight_version="default"
    )
    assert body["status"] == "ok"


async def scores(worker: WorkerProcess, **options: Any) -> list[float]:
    _, body = await worker.control("probe", token_ids=[PROMPT], **options)
    result: list[float] = body["logprobs"][0]
    return result


async def in_flight(worker: WorkerProcess, count: int = 1) -> list[asyncio.Task[Any]]:
    """Start long requests and return once they generate."""
    _, before = await worker.control("liveness_probe")
    tasks = [
        asyncio.create_task(
            worker.generate([5 + i, *PROMPT], max_tokens=900, ignore_eos=True, logprobs=0)
        )
        for i in range(count)
    ]
    while True:
        _, now = await worker.control("liveness_probe")
        if now["running"] == count and now["generated_tokens"] > before["generated_tokens"] + count:
            return tasks
        await asyncio.sleep(0.005)


BAD_LABELS = ["a+b", "a\nb", "\x1b[31m", "[bold]", "x" * 100_000]


@pytest.mark.failure_mode("F50")
@pytest.mark.parametrize("label", BAD_LABELS, ids=lambda label: ascii(label[:10]))
async def test_an_ambiguous_label_is_rejected(
    worker: WorkerProcess, checkpoint: Checkpoint, label: str
) -> None:
    path = str(checkpoint("new"))
    disk = {"model_path": path, "weight_version": label}
    group = {"group_name": "g", "partial": True, "weight_version": label,
             "tensors": [{"name": "x", "dtype": "float32", "shape": [1]}]}  # fmt: skip
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("stage", "weight_version", disk),
        ("stage", "weight_version", group),
        ("update_weights_from_disk", "weight_version", disk),
        ("load_lora_adapter", "lora_name", {"lora_name": label, "lora_path": path}),
        ("load_lora_adapter", "version", {"lora_name": "x", "lora_path": path, "version": label}),
    ]
    for method, param, body in calls:
        status, response = await worker.control(method, **body)
        assert (status, response["error"]["param"]) == (400, param), (method, response)
        assert len(response["error"]["message"]) < 300
    demand = {"token_ids": PROMPT, "weight_version": label, "sampling_params": {"max_tokens": 1}}
    status, response = await worker.post(GENERATE, demand)
    assert (status, response["error"]["param"]) == (400, "weight_version")
    (choice,) = (await worker.generate(PROMPT, max_tokens=1, logprobs=0))[1]["choices"]
    assert [span["version"] for span in choice["weight_versions"]] == ["default"]


async def test_the_size_of_a_probe_is_bounded(worker: WorkerProcess) -> None:
    status, body = await worker.control("probe", token_ids=[[1, 2]] * 5000)
    assert (status, body["error"]["param"]) == (400, "token_ids")
    assert "at most 4096 sequences" in body["error"]["message"]


@pytest.mark.failure_mode("F50")
async def test_the_name_of_a_directory_is_checked_as_a_label(
    worker: WorkerProcess, checkpoint: Checkpoint
) -> None:
    path = checkpoint("new").rename(checkpoint("old").with_name("a+b"))
    status, response = await worker.control("stage", model_path=str(path))
    assert (status, response["error"]["param"]) == (400, "weight_version")
    status, response = await worker.control("stage", model_path=str(path), weight_version="b")
    assert (status, response["staged"]) == (200, "b")
    await worker.control("rollback")


# Who may call


@pytest.mark.failure_mode("F42")
async def test_every_method_needs_the_admin_token(worker: WorkerProcess) -> None:
    for wrong in ("not-the-token", ""):
        status, body = await worker.control("pause_generation", token=wrong or "x", mode="abort")
        assert status == 401
        assert TOKEN not in json.dumps(body)
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{worker.system_url}/engine/pause_generation") as response:
            assert response.status == 401
    _, health = await worker.get("/health")
    assert health["state"] == "running"


@pytest.mark.failure_mode("F42")
async def test_a_get_changes_nothing(worker: WorkerProcess) -> None:
    status, _ = await worker.control("pause_generation", verb="GET")
    assert status == 405
    _, health = await worker.get("/health")
    assert health["state"] == "running"


@pytest.mark.failure_mode("F42")
async def test_control_routes_are_not_on_the_data_port(worker: WorkerProcess) -> None:
    status, _ = await worker.post("/engine/pause_generation", {})
    assert status == 404


async def test_unknown_methods_fields_and_modes_are_rejected(worker: WorkerProcess) -> None:
    status, body = await worker.control("nope")
    assert (status, "stage" in body["error"]["message"]) == (404, True)
    status, body = await worker.control("pause_generation", mod="keep")
    assert (status, body["error"]["param"]) == (400, "mod")
    status, body = await worker.control("pause_generation", mode="later")
    assert (status, body["error"]["param"]) == (400, "mode")


# Pauses


@pytest.mark.failure_mode("F12")
async def test_pause_abort_ends_requests_with_their_partial_tokens(worker: WorkerProcess) -> None:
    tasks = await in_flight(worker, 2)
    status, _ = await worker.control("pause_generation", mode="abort")
    assert status == 200
    for _, body in await asyncio.gather(*tasks):
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) < 900
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F12")
async def test_an_aborted_completion_is_continued_token_exactly(worker: WorkerProcess) -> None:
    (task,) = await in_flight(worker)
    await worker.control("pause_generation", mode="abort")
    await worker.control("resume_generation")
    _, body = await task
    (choice,) = body["choices"]
    prompt = [5, *PROMPT, *choice["token_ids"]]
    _, again = await worker.generate(prompt, max_tokens=2, prompt_logprobs=0, logprobs=0)
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    rescored = [next(iter(e.values()))["logprob"] for e in again["prompt_logprobs"][8:]]
    assert rescored == sampled


async def test_pause_wait_returns_when_running_requests_have_ended(worker: WorkerProcess) -> None:
    tasks = await in_flight(worker)
    await worker.control("pause_generation", mode="wait")
    assert tasks[0].done() or (await asyncio.wait_for(tasks[0], 5))
    _, body = tasks[0].result()
    assert body["choices"][0]["finish_reason"] == "length"


async def test_pause_keep_freezes_and_new_requests_queue(worker: WorkerProcess) -> None:
    (frozen,) = await in_flight(worker)
    await worker.control("pause_generation", mode="keep")
    _, before = await worker.control("liveness_probe")
    queued = asyncio.create_task(worker.generate(PROMPT, max_tokens=2, ignore_eos=True))
    while (await worker.control("liveness_probe"))[1]["waiting"] < 1:
        await asyncio.sleep(0.005)
    _, after = await worker.control("liveness_probe")
    assert after["generated_tokens"] == before["generated_tokens"]
    assert not frozen.done()
    await worker.control("resume_generation")
    (_, body), (_, other) = await asyncio.gather(frozen, queued)
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(other["choices"][0]["token_ids"]) == 2


# The weight transaction


async def test_stage_does_not_change_the_live_weights(
    worker: WorkerProcess, checkpoint: Checkpoint
) -> None:
    before = await scores(worker)
    status, body = await worker.control(
        "stage", model_path=str(checkpoint("b")), weight_version="B"
    )
    assert (status, body["staged"], body["version"]) == (200, "B", "default")
    assert await scores(worker) == before
    assert await scores(worker, staged=True) != before


async def test_commit_then_rollback_restores_every_bit(
    worker: WorkerProcess, checkpoint: Checkpoint
) -> None:
    before = await scores(worker)
    await worker.control("stage", model_path=str(checkpoint("b")), weight_version="B")
    staged = await scores(worker, staged=True)
    _, body = await worker.control("commit", weight_version="B")
    assert body["version"] == "B"
    assert await scores(worker) == staged
    _, body = await worker.control("rollback")
    assert body["version"] == "default"
    assert await scores(worker) == before
    status, _ = await worker.control("rollback")
    assert status == 409


async def test_commit_of_another_version_than_staged_is_rejected(
    worker: WorkerProcess, checkpoint: Checkpoint
) -> None:
    status, _ = await worker.control("commit")
    assert status == 409
    await worker.control("stage", model_path=str(checkpoint("b")), weight_version="B")
    status, body = await worker.control("commit", weight_version="C")
    assert (status, "'B'" in body["error"]["message"]) == (409, True)
    assert (await worker.control("get_weight_version"))[1]["version"] == "default"
    await worker.control("rollback")


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F43")
async def test_tokens_carry_the_version_they_were_sampled_under(
    worker: WorkerProcess, checkpoint: Checkpoint
) -> None:
    await worker.control("stage", model_path=str(checkpoint("b")), weight_version="B")
    (task,) = await in_flight(worker)
    await worker.control("pause_generation", mode="keep")
    await worker.control("commit", weight_version="B")
    await worker.control("resume_generation")
    _, body = await task
    (choice,) = body["choices"]
    old, new = choice["weight_versions"]
    assert (old["version"], new["version"]) == ("default", "B")
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], 900)
    tokens = [5, *PROMPT, *choice["token_ids"]]
    _, body = await worker.control("probe", token_ids=[tokens])
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert body["logprobs"][0][7 + new["start"] :] == sampled[new["start"] :]


@pytest.mark.failure_mode("F43")
async def test_a_request_may_require_a_version_or_a_minimum(
    worker: WorkerProcess, checkpoint: Checkpoint
) -> None:
    status, body = await worker.generate(PROMPT, max_tokens=1, weight_version="B")
    assert (status, body["error"]["reason"]) == (409, "version_unavailable")
    status, _ = await worker.generate(PROMPT, max_tokens=1, min_weight_version="unheard-of")
    assert status == 409
    path = str(checkpoint("b"))
    await worker.control("update_weights_from_disk", model_path=path, weight_version="B2")
    for demand in ({"weight_version": "B2"}, {"min_weight_version": "default"}):
        status, _ = await worker.generate(PROMPT, max_tokens=1, **demand)
        assert status == 200


@pytest.mark.failure_mode("F27")
async def test_cached_prefixes_of_old_weights_are_never_used(
    worker: WorkerProcess, checkpoint: Checkpoint
) -> None:
    prompt = [(7 * i) % 500 for i in range(200)]
    options = {"max_tokens": 8, "seed": 3, "logprobs": 0, "ignore_eos": True}
    await worker.generate(prompt, **options)
    path = str(checkpoint("b"))
    await worker.control("update_weights_from_disk", model_path=path, weight_version="default")
    _, warm = await worker.generate(prompt, **options)
    await worker.control("flush_cache")
    _, cold = await worker.generate(prompt, **options)
    assert warm["choices"] == cold["choices"]


@pytest.mark.failure_mode("F34")
async def test_broken_checkpoints_are_rejected_and_change_nothing(
    worker: WorkerProcess, checkpoint: Checkpoint
) -> None:
    before = await scores(worker)

    def truncated(path: Path) -> None:
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])

    def changed(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(path / "model.safetensors")
        edit(tensors)
        save_file(tensors, path / "model.safetensors")

    name = "model.layers.1.self_attn.k_proj.weight"
    broken: dict[str, Callable[[Path], None]] = {
        "truncated": truncated,
        "gone": lambda p: (p / "model.safetensors").unlink(),
        "missing": lambda p: changed(p, lambda t: t.pop(name)),
        "shape": lambda p: changed(p, lambda t: t.update({name: torch.zeros(3, 3)})),
        "dtype": lambda p: changed(
            p, lambda t: t.update({name: torch.zeros(64, 128, dtype=torch.int8)})
        ),
        "nan": lambda p: changed(p, lambda t: t[name].fill_(float("nan"))),
        "extra": lambda p: changed(p, lambda t: t.update({"what": torch.zeros(1)})),
        "config": lambda p: (p / "config.json").write_text(
            (p / "config.json").read_text().replace('"hidden_size": 128', '"hidden_size": 256')
        ),
    }
    for kind, damage in broken.items():
        path = checkpoint(kind)
        damage(path)
        status, body = await worker.control("stage", model_path=str(path), weight_version="bad")
        assert (kind, status, body["error"]["reason"]) == (kind, 422, "bad_checkpoint")
    _, alive = await worker.control("liveness_probe")
    assert (alive["version"], alive["staged"]) == ("default", None)
    assert await scores(worker) == before


async def test_weights_arrive_by_broadcast(worker: WorkerProcess, tmp_path: Path) -> None:
    port = free_port()
    joining = asyncio.create_task(
        worker.control(
            "init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            rank=1,
            world_size=2,
        )
    )
    trainer = await asyncio.to_thread(Broadcast.join, "127.0.0.1", port, 0, 2)
    assert (await joining)[0] == 200
    source = bundled("tiny")
    assert source is not None
    tensors = {n: 1.1 * t for n, t in load_file(source / "model.safetensors").items()}
    update = asyncio.create_task(
        worker.control(
            "update_weights_from_distributed",
            names=list(tensors),
            dtypes=["float32"] * len(tensors),
            shapes=[list(t.shape) for t in tensors.values()],
            weight_version="sent",
        )
    )
    await asyncio.to_thread(trainer.send, tensors.values())
    status, body = await update
    assert (status, body["version"]) == (200, "sent")
    sent = await scores(worker)
    shutil.copytree(source, copy := tmp_path / "sent")
    save_file(tensors, copy / "model.safetensors")
    await worker.control("update_weights_from_disk", model_path=str(copy), weight_version="disk")
    assert await scores(worker) == sent
    assert (await worker.control("destroy_weights_update_group"))[0] == 200
    assert (await worker.control("destroy_weights_update_group"))[0] == 404


@pytest.mark.failure_mode("F28")
async def test_a_probe_distinguishes_right_from_wrong_weights(
    worker: WorkerProcess, checkpoint: Checkpoint
) -> None:
    expected = await scores(worker)
    _, body = await worker.control("probe", token_ids=[PROMPT], logprobs=[expected])
    assert (body["passed"], body["max_difference"]) == (True, 0.0)
    path = str(checkpoint("b", scale=1e-3))
    await worker.control("update_weights_from_disk", model_path=path, weight_version="B")
    _, body = await worker.control("probe", token_ids=[PROMPT], logprobs=[expected])
    assert body["passed"] is False
    status, _ = await worker.control("probe", token_ids=[PROMPT], logprobs=[expected[:-1]])
    assert status == 400


# Adapters


@pytest.mark.failure_mode("F30")
@pytest.mark.failure_mode("F31")
async def test_an_adapter_is_served_swapped_and_unloaded(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    options = {"max_tokens": 6, "seed": 1, "logprobs": 0, "ignore_eos": True}
    prompt = [(3 * i) % 500 for i in range(60)]
    _, base = await worker.generate(prompt, **options)
    path = write_adapter(tmp_path / "ad", seed=1)
    status, body = await worker.control("load_lora_adapter", lora_name="ad", lora_path=str(path))
    assert (status, body["hot_swap"]) == (200, False)
    _, first = await worker.generate(prompt, **options, model="ad")
    assert first["choices"][0]["logprobs"] != base["choices"][0]["logprobs"]
    (span,) = first["choices"][0]["weight_versions"]
    assert span["version"] == body["version"]
    _, models = await worker.get("/v1/models")
    assert [(card["id"], card["parent"]) for card in models["data"]] == [
        ("tiny", None),
        ("ad", "tiny"),
    ]
    write_adapter(path, seed=2)
    _, body = await worker.control("load_lora_adapter", lora_name="ad", lora_path=str(path))
    assert body["hot_swap"] is True
    _, second = await worker.generate(prompt, **options, model="ad")
    await worker.control("flush_cache")
    _, cold = await worker.generate(prompt, **options, model="ad")
    assert second["choices"] == cold["choices"] != first["choices"]
    _, untouched = await worker.generate(prompt, **options)
    assert untouched["choices"] == base["choices"]
    await worker.control("unload_lora_adapter", lora_name="ad")
    status, _ = await worker.generate(prompt, **options, model="ad")
    assert status == 404
    status, _ = await worker.control("unload_lora_adapter", lora_name="ad")
    assert status == 404


@pytest.mark.failure_mode("F29")
async def test_a_swap_that_fails_leaves_the_old_adapter_served(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "good", seed=1)
    _, loaded = await worker.control("load_lora_adapter", lora_name="ad", lora_path=str(path))
    bad = write_adapter(tmp_path / "bad", rank=128)
    status, body = await worker.control("load_lora_adapter", lora_name="ad", lora_path=str(bad))
    assert (status, body["error"]["reason"]) == (422, "bad_adapter")
    _, response = await worker.generate(PROMPT, max_tokens=1, model="ad")
    assert response["choices"][0]["weight_versions"][0]["version"] == loaded["version"]
    await worker.control("unload_lora_adapter", lora_name="ad")


async def test_paths_must_be_absolute_directories(worker: WorkerProcess, tmp_path: Path) -> None:
    for method, field in (("stage", "model_path"), ("load_lora_adapter", "lora_path")):
        extra = {"lora_name": "x"} if method == "load_lora_adapter" else {"weight_version": "x"}
        for path, status in (("", 400), ("relative", 400), (str(tmp_path / "nope"), 422)):
            got, body = await worker.control(method, **{field: path}, **extra)
            assert (got, body["error"]["param"]) == (status, field)


# A worker of its own


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[WorkerProcess]:
    marker = request.node.get_closest_marker("arguments")
    process = WorkerProcess(*marker.args, **marker.kwargs)
    yield process
    process.process.kill()
    process.process.wait()


@pytest.mark.arguments("--max-model-len", "256", model="tiny-moe")
@pytest.mark.failure_mode("F38")
async def test_routed_experts_in_both_formats_and_from_any_row(own: WorkerProcess) -> None:
    import base64
    import io

    import numpy as np

    options = {"max_tokens": 5, "seed": 1, "ignore_eos": True}
    _, plain = await own.generate(PROMPT, **options)
    assert plain["choices"][0]["routed_experts"] is None
    _, unasked = await own.generate(PROMPT, **options, routed_experts_prompt_start=4)
    assert unasked["choices"][0]["routed_experts"] is None
    _, body = await own.generate(PROMPT, **options, return_routed_experts=True)
    raw = body["choices"][0]["routed_experts"]
    assert raw["shape"] == [len(PROMPT) + 5 - 1, 2, 2]
    whole = np.frombuffer(base64.b64decode(raw["data"]), raw["dtype"]).reshape(raw["shape"])
    assert whole.max() < 8
    _, body = await own.generate(
        PROMPT,
        **options,
        return_routed_experts=True,
        routed_experts_prompt_start=4,
        routed_experts_format="npy",
    )
    text = body["choices"][0]["routed_experts"]
    rest = np.load(io.BytesIO(base64.b64decode(text)))
    assert np.array_equal(rest, whole[4:])


@pytest.mark.arguments("--max-model-len", "4096", "--drain-seconds", "0.2", token=None)
async def test_sigterm_drains_then_aborts_and_removes_its_token(own: WorkerProcess) -> None:
    file = Path(own.ready["admin_token_file"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    own.token = file.read_text()
    (task,) = await in_flight_of(own)
    code = await asyncio.to_thread(own.stop)
    _, body = await task
    assert body["choices"][0]["finish_reason"] == "abort"
    assert len(body["choices"][0]["token_ids"]) > 0
    assert code == 0
    assert not file.exists()


async def in_flight_of(own: WorkerProcess) -> list[asyncio.Task[Any]]:
    task = asyncio.create_task(own.generate([1], max_tokens=4000, ignore_eos=True))
    while not (await own.control("liveness_probe"))[1]["generated_tokens"]:
        await asyncio.sleep(0.005)
    return [task]


@pytest.mark.arguments("--max-model-len", "64", "--checkpoint-root", "/nonexistent-root")
@pytest.mark.failure_mode("F33")
async def test_weights_are_loaded_only_from_allowed_roots(
    own: WorkerProcess, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(bundled("tiny") or "")
    for path in (str(bundled("tiny")), str(link)):
        status, body = await own.control("stage", model_path=path)
        assert (status, body["error"]["reason"]) == (403, "forbidden")
