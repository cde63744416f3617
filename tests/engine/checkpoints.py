"""Checkpoints and adapters for tests: small, random, and different from each other."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.engine import exact

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def save(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint with the config of `source` and other tensors."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", target)
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors")
    return target


def variant(source: Path, target: Path, seed: int, scale: float = 0.05) -> Path:
    """Write `source` with noise on every tensor, as after some training steps."""
    rng = torch.Generator().manual_seed(seed)
    noisy = {
        name: t + scale * t.std() * torch.randn(t.shape, generator=rng)
        for name, t in tensors_of(source).items()
    }
    return save(source, target, noisy)


@cache
def trainer(directory: Path) -> Any:
    """Return the prepared transformers model of a checkpoint. It is cached: do not change it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return exact.prepare(model.eval())


def reference(directory: Path, token_ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return the trainer's logprobs of a sequence, one for each token after the first."""
    with torch.no_grad():
        logprobs = exact.token_logprobs(trainer(directory), token_ids, temperature)
    assert isinstance(logprobs, Tensor)
    return logprobs.tolist()


def peft_model(
    source: Path, *, rank: int = 4, modules: tuple[str, ...] = ATTENTION, seed: int = 0,
    alpha: float = 8,
) -> Any:  # fmt: skip
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    settings = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules))
    model = get_peft_model(base, settings)
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=rng)
    return model.eval()


def adapter(source: Path, target: Path, **how: Any) -> Path:
    """Write a LoRA adapter for `source` with PEFT."""
    peft_model(source, **how).save_pretrained(target)
    return target


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_adapter(directory: Path, **changes: Any) -> Path:
    edit_json(directory / "adapter_config.json", **changes)
    return directory
