"""Checksums of parameters, from a checkpoint and as SGLang computes them on a CPU."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.backends.sglang.held_weights import compare
from lockstep.checkpoint.validate import Checkpoint

LAYER = "model.layers.0"


def checksum(tensor: Tensor) -> str:
    """What SGLang's /weights_checker returns for a parameter on a CPU."""
    raw = tensor.contiguous().view(torch.uint8).reshape(-1).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(3)
    shapes = {
        "model.embed_tokens.weight": (70, 8),
        f"{LAYER}.self_attn.q_proj.weight": (8, 8),
        f"{LAYER}.self_attn.k_proj.weight": (4, 8),
        f"{LAYER}.self_attn.v_proj.weight": (4, 8),
        f"{LAYER}.mlp.gate_proj.weight": (16, 8),
        f"{LAYER}.mlp.up_proj.weight": (16, 8),
        "model.norm.weight": (8,),
    }
    return {name: torch.randn(shape, generator=noise).to(dtype) for name, shape in shapes.items()}


def served(weights: dict[str, Tensor], dtype: torch.dtype, *, padded: bool) -> dict[str, str]:
    """The checksums of a server that holds these weights."""
    own = {name: tensor.to(dtype) for name, tensor in weights.items()}
    embedding = own["model.embed_tokens.weight"]
    if padded:
        embedding = torch.cat([embedding, torch.zeros(128 - 70, 8, dtype=dtype)])
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    fused = [own[f"{attention}.{part}_proj.weight"] for part in "qkv"]
    gated = [own[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")]
    return {
        "model.embed_tokens.weight": checksum(embedding),
        f"{attention}.qkv_proj.weight": checksum(torch.cat(fused)),
        f"{mlp}.gate_up_proj.weight": checksum(torch.cat(gated)),
        "model.norm.weight": checksum(own["model.norm.weight"]),
    }


def written(folder: Path, weights: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded vocabulary"])
@pytest.mark.parametrize(("kept", "computed"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
])  # fmt: skip
def test_held_weights_are_recognised_in_every_dtype(
    tmp_path: Path, kept: torch.dtype, computed: torch.dtype, padded: bool
) -> None:
    weights = tensors(kept)
    path = written(tmp_path / "a", weights)
    name = str(computed).removeprefix("torch.")
    held = compare(path, name, served(weights, computed, padded=padded))
    assert held.report.is_complete
    assert held.report.different == 0
    assert held.report.elements == sum(tensor.numel() for tensor in weights.values())
    assert held.digest == Checkpoint.validate(path, roots=(path,)).digest


def test_one_element_that_differs_is_found_and_its_tensors_are_named(tmp_path: Path) -> None:
    weights = tensors(torch.float32)
    path = written(tmp_path / "a", weights)
    other = dict(weights)
    other[f"{LAYER}.self_attn.k_proj.weight"] = weights[f"{LAYER}.self_attn.k_proj.weight"].clone()
    other[f"{LAYER}.self_attn.k_proj.weight"][3, 7] += 1e-6
    held = compare(path, "float32", served(other, torch.float32, padded=False))
    assert held.digest is None
    assert held.report.differing == [f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"]
    assert held.report.describe_difference().startswith(
        "3 of 7 tensors differ from the checkpoint by their checksums: tensors 'model.layers.0."
    )


@pytest.mark.failure_mode("F28")
@pytest.mark.parametrize("name", ["model.norm.weight", f"{LAYER}.mlp.up_proj.weight"])
def test_a_tensor_that_the_checkpoint_lacks_is_a_difference(tmp_path: Path, name: str) -> None:
    weights = tensors(torch.float32)
    sums = served(weights, torch.float32, padded=False)
    path = written(tmp_path / "a", {key: weights[key] for key in weights if key != name})
    held = compare(path, "float32", sums)
    assert held.digest is None
    assert name in held.report.differing


def test_what_cannot_be_compared_is_named_and_proves_nothing(tmp_path: Path) -> None:
    weights = tensors(torch.float32)
    sums = served(weights, torch.float32, padded=False)
    sums["model.layers.0.mlp.experts.w13_weight"] = "0" * 16
    extra = written(tmp_path / "a", weights | {"lm_head.weight": torch.zeros(70, 8)})
    held = compare(extra, "float32", sums)
    assert held.digest is None
    assert set(held.report.unread) == {"lm_head.weight", "model.layers.0.mlp.experts.w13_weight"}
    in_eight_bits = compare(extra, "float8_e4m3fn", sums)
    assert in_eight_bits.digest is None
    assert "was converted to float8_e4m3fn" in in_eight_bits.report.describe_unread()
