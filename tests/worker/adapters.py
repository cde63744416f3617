"""Hand-made PEFT adapters for the bundled models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, Q, KV, WIDTH, LAYERS = 128, 128, 64, 384, 2
SIZES = {
    "self_attn.q_proj": (HIDDEN, Q),
    "self_attn.v_proj": (HIDDEN, KV),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}


def write_adapter(path: Path, *, rank: int = 4, seed: int = 0, scale: float = 0.3) -> Path:
    """Write an adapter with random weights to `path`. The same seed gives the same contents."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (size_in, size_out) in SIZES.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = scale * torch.randn(
                rank, size_in, generator=generator
            )
            tensors[f"{name}.lora_B.weight"] = scale * torch.randn(
                size_out, rank, generator=generator
            )
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    targets = [module.split(".")[-1] for module in SIZES]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets,
                "bias": "none", "task_type": "CAUSAL_LM"}  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path
