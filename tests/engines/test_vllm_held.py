"""A real vLLM server is believed only if it computes with the weights and adapters it was given.

Faults are injected inside the server, after it has read the right files, for steps of a trainer
from large to so small that logprobs cannot show them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lockstep.checkpoint.manifest import PROBE, WEIGHTS
from lockstep.checkpoint.probe import Probe, builtin
from lockstep.fleet.fleet import Fleet
from lockstep.tokens.errors import LockstepError
from tests.engines import vllm_models as models
from tests.engines.held_faults import (
    ADAPTER_FAULTS,
    WEIGHT_FAULTS,
    Tensors,
    changes_anything,
)
from tests.engines.test_vllm_evidence import evidence, fleet_of
from tests.engines.vllm_models import VOCABULARY, Reference
from tests.engines.vllm_servers import Vllm

pytestmark = pytest.mark.timeout(400)
SEQUENCES = builtin(VOCABULARY, 64, (64,) * 4 + (9,) * 8)
BOTH = pytest.mark.parametrize("server", ["dense", "dense-bf16"], indirect=True)
RATES = (1e-3, 1e-4, 1e-5, 2e-6)
ADAPTER_RATE = 1e-4
OTHER = "computes with other weights than it was given: "


def after_a_step(server: Vllm, rate: float) -> Path:
    """The checkpoint of a trainer after one step of AdamW, with a probe of both versions."""
    target = server.folder / f"adamw-{rate:g}"
    if not target.exists():
        model = AutoModelForCausalLM.from_pretrained(server.a, dtype=torch.float32)
        ids = torch.tensor([list(ids) for ids in SEQUENCES[:4]])
        model(ids, labels=ids).loss.backward()
        torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0).step()
        state, names = model.state_dict(), load_file(server.a / WEIGHTS).keys()
        models.written(server.a, target, {name: state[name].contiguous() for name in names})
        write_probe(target / PROBE, Reference(target), Reference(server.a))
    return target


def write_probe(path: Path, new: Reference, old: Reference | None = None) -> None:
    rows = tuple(map(tuple, new.rows(SEQUENCES)))
    previous = old and tuple(map(tuple, old.rows(SEQUENCES)))
    Probe(SEQUENCES, rows, None, previous=previous, dtype="float32").write(path)


async def accept(fleet: Fleet, path: Path, version: str) -> None:
    await fleet.update_weights(str(path), version=version)
    record = await evidence(fleet)
    print(f"{version}: {record}")
    assert (record.decided_by, record.held) == ("held", "match")


@BOTH
@pytest.mark.failure_mode("F48")
@pytest.mark.parametrize("rate", RATES)
async def test_a_server_that_holds_other_weights_is_rejected_however_small_the_step(
    server: Vllm, rate: float
) -> None:
    step, dtype = after_a_step(server, rate), getattr(torch, server.dtype)
    old, new = (load_file(path / WEIGHTS) for path in (server.a, step))
    void = []
    async with fleet_of(server) as (fleet, _):
        await accept(fleet, step, f"right-{rate:g}")
        await accept(fleet, server.a, f"back-{rate:g}")
        for fault in WEIGHT_FAULTS:
            version = f"{fault.replace(' ', '-')}-{rate:g}"
            await server.rpc("faulty_weights", fault=fault, old=str(server.a / WEIGHTS))
            if not changes_anything(fault, old, new, dtype):
                void.append(fault)
                await accept(fleet, step, version)
                await accept(fleet, server.a, f"back-{version}")
                continue
            with pytest.raises(LockstepError, match=OTHER):
                await fleet.update_weights(str(step), version=version)
            record = await evidence(fleet)
            assert (record.decided_by, record.held, record.digest) == ("held", "mismatch", "match")
            assert [worker.state for worker in fleet.workers] == ["serving"], fault
            assert fleet.desired.version == f"back-{rate:g}" or void
        changed = share_changed(old, new, dtype)
        print(f"{server.dtype}, lr {rate:g}: {changed:.2%} of the elements change, void {void}")
        # In bfloat16 the smallest step changes no norm, so that stale norms are the right ones.
        assert set(void) <= {"stale norms"}


def share_changed(old: Tensors, new: Tensors, dtype: torch.dtype) -> float:
    different = sum(int((new[name].to(dtype) != old[name].to(dtype)).sum()) for name in new)
    return different / sum(tensor.numel() for tensor in new.values())


def adapter_after_steps(server: Vllm, steps: int) -> Path:
    """A LoRA adapter after its first steps, when B is near zero and logprobs hardly move."""
    target = server.folder / f"adapter-{steps}"
    if not target.exists():
        file = models.adapter(server.a, target, seed=5) / "adapter_model.safetensors"
        signs = torch.Generator().manual_seed(6)
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if "lora_B" in name:
                moves = [torch.randn(tensor.shape, generator=signs).sign() for _ in range(steps)]
                tensors[name] = ADAPTER_RATE * torch.stack(moves).sum(0)
        save_file(tensors, file)
        merged = models.merged(server.a, target, server.folder / f"merged-{steps}")
        write_probe(target / PROBE, Reference(merged))
    return target


@BOTH
@pytest.mark.failure_mode("F48")
async def test_a_server_that_holds_another_adapter_is_rejected(server: Vllm) -> None:
    first, second = (adapter_after_steps(server, steps) for steps in (1, 2))
    before = str(first / "adapter_model.safetensors")
    async with fleet_of(server) as (fleet, admin):
        await fleet.load_adapter("tuned", str(first))
        record = await evidence(fleet)
        print(f"{server.dtype}: {record}")
        assert (record.decided_by, record.held) == ("held", "match")
        for fault in ADAPTER_FAULTS:
            await server.rpc("faulty_adapter", fault=fault, old=before)
            try:
                with pytest.raises(LockstepError, match=OTHER):
                    await fleet.load_adapter("tuned", str(second))
            finally:
                await server.rpc("sound_adapters")
            record = await evidence(fleet)
            assert (record.decided_by, record.held) == ("held", "mismatch"), fault
            assert fleet.desired.adapters["tuned"].path == str(first)
            report = await admin.read_back(adapter="tuned", path=first)
            assert report is not None
            assert (report.different, report.unread) == (0, {})
        await fleet.load_adapter("tuned", str(second))
        assert (await evidence(fleet)).held == "match"
        await fleet.unload_adapter("tuned")
