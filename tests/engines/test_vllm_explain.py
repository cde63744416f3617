"""Faults of a real vLLM server are named in float32 and bfloat16; clean runs are healthy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lockstep
from lockstep.backends.transport import GenerateRequest
from lockstep.explain import Explanation
from lockstep.tokens import Sample, Sampling
from tests.engine.rig import sample_of
from tests.engines import vllm_models as models
from tests.engines.vllm_models import WEIGHTS
from tests.engines.vllm_servers import Vllm, updated
from tests.explain.faults import shortened
from tests.explain.scene import relabel

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.close_arithmetic("a trainer of another engine than vLLM is close to it at best"),
]
PROMPTS = [[7, 100, 23, 400, 9, 311, 42, 5 + at] * (2 + at % 2) for at in range(6)]
PLAIN: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "logprobs": 0, "temperature": 1.0}


def after_an_update(server: Vllm, size: float) -> Path:
    """Return a checkpoint a few steps after the server's first."""
    target = server.folder / f"update-{size}"
    if not target.exists():
        rng = torch.Generator().manual_seed(3)
        tensors = {
            name: tensor + size * tensor.std() * torch.randn(tensor.shape, generator=rng)
            for name, tensor in load_file(server.a / WEIGHTS).items()
        }
        models.written(server.a, target, tensors)
        server.probes[target] = models.probe(target)
    return target


async def rollout(server: Vllm, adapter: str | None = None, **options: Any) -> list[Sample]:
    """Sample on the server, all prompts at once."""
    front = options.pop("front", [])
    async with server.transport() as transport:
        groups = await asyncio.gather(
            *(
                transport.generate(
                    GenerateRequest(
                        prompt_ids=[*front, *prompt],
                        sampling=Sampling(**(PLAIN | options | {"seed": at})),
                        model=adapter, timeout=240,
                    )
                )
                for at, prompt in enumerate(PROMPTS)
            )
        )  # fmt: skip
    samples = [sample_of(completion) for group in groups for completion in group]
    return [shortened(sample, len(front)) for sample in samples]


async def explained(samples: Sequence[Sample], checkpoint: Path, **what: Any) -> Explanation:
    return await asyncio.to_thread(lockstep.explain, samples, checkpoint, **({"others": []} | what))


async def serve(server: Vllm, checkpoint: Path, version: str) -> None:
    async with server.admin() as admin:
        await updated(server, admin, checkpoint, version)


@pytest.mark.failure_mode("F78")
async def test_faults_in_float32_are_named(dense: Vllm) -> None:
    new = after_an_update(dense, 0.02)
    await serve(dense, dense.a, "old")
    stale = await rollout(dense)
    tensors = load_file(new / WEIGHTS)
    old = load_file(dense.a / WEIGHTS)
    mixed = {name: old[name] if ".layers.1." in name else t for name, t in tensors.items()}
    half = dense.folder / "half"
    if not half.exists():
        models.written(dense.a, half, mixed)
        dense.probes[half] = models.probe(half)
    await serve(dense, half, "half")
    partial = await rollout(dense)
    await serve(dense, new, "new")
    clean = await rollout(dense)
    lora = dense.folder / "lora-explain"
    if not lora.exists():
        models.adapter(dense.a, lora, seed=11)
    async with dense.admin() as admin:
        await admin.load_adapter("explained", lora)
        adapted = await rollout(dense, "explained")
        await admin.unload_adapter("explained")
    plain = {"shaping": (), "temperature": 1.0, "support": None}
    cases: list[tuple[str, list[Sample], dict[str, Any]]] = [
        ("healthy", clean, {"others": [dense.a]}),
        ("healthy", adapted, {"adapter": lora}),
        ("old_weights", stale, {"others": [dense.a]}),
        ("old_tensors", partial, {"others": [dense.a]}),
        ("adapter_missing", relabel(clean, adapter="explained"), {"adapter": lora}),
        ("adapter_unexpected", adapted, {"other_adapters": [lora]}),
        ("temperature", relabel(await rollout(dense, temperature=0.7), **plain), {}),
        ("penalty", relabel(await rollout(dense, repetition_penalty=1.2), **plain), {}),
        ("truncation", relabel(await rollout(dense, top_k=20), **plain), {}),
        ("truncation", relabel(await rollout(dense, top_p=0.8), **plain), {}),
        ("bos", await rollout(dense, front=PROMPTS[0][:1]), {}),
    ]  # fmt: skip
    wrong = []
    for cause, samples, what in cases:
        verdict = await explained(samples, new, **what)
        if (verdict.cause or verdict.outcome) != cause:
            wrong.append(f"{cause}: " + "\n".join(verdict.lines()))
    assert not wrong, "\n\n".join(wrong)
    live = await explained(stale, new, others=[dense.a], server=dense.url)
    assert live.cause == "old_weights"
    assert live.requests == 2 * len(PROMPTS)
    assert any("agree with the checkpoint" in note for note in live.notes)


@pytest.mark.failure_mode("F78")
@pytest.mark.parametrize("server", ["dense-bf16"], indirect=True)
async def test_faults_in_bfloat16_are_named(server: Vllm) -> None:
    new = after_an_update(server, 0.2)
    await serve(server, server.a, "old")
    stale = await rollout(server)
    await serve(server, new, "new")
    clean = await rollout(server)
    cases: list[tuple[str, list[Sample], dict[str, Any]]] = [
        ("healthy", clean, {}),
        ("healthy", await rollout(server, temperature=0.7, logprobs=0), {}),
        ("old_weights", stale, {"others": [server.a]}),
        ("temperature", relabel(await rollout(server, temperature=0.5), temperature=1.0), {}),
    ]
    wrong = []
    for cause, samples, what in cases:
        verdict = await explained(samples, new, engine_dtype="bfloat16", **what)
        if (verdict.cause or verdict.outcome) != cause:
            wrong.append(f"{cause}: " + "\n".join(verdict.lines()))
    assert not wrong, "\n\n".join(wrong)
