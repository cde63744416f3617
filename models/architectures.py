"""The shapes of the bundled models: a dense Qwen3 and its mixture-of-experts twin."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from make_tokenizer import MAX_LENGTH, VOCABULARY

ARCHITECTURES = ("dense", "moe")


def build(arch: str, *, end: int, pad: int, seed: int) -> Any:
    """Return an untrained fp32 model; `end` and `pad` are the token ids of the tokenizer."""
    shared: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float32",
    }
    torch.manual_seed(seed)
    if arch == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**shared))
    if arch == "moe":
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **experts))
    raise ValueError(f"unknown architecture {arch!r}: choose from {', '.join(ARCHITECTURES)}")
