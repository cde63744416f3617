"""Compiles the kernels of a layer for a GPU that is not present, and prints their shared memory.

    python -m tests.engine.cuda.kernels.fitted 89 [close] [exact] [fp32]

Prints a line of JSON for each kernel: its name, the most shared memory that one of its programs
needs, and for which number of rows.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda.kernels import (
    close_kernels,
    exact_attention,
    exact_kernels,
    experts,
    prefill_kernels,
    single_row,
)
from lockstep.engine.cuda.kernels.adapters import AdapterBank
from lockstep.engine.cuda.kernels.exact_gated import linear_gated
from lockstep.models import model_directory
from tests.engine.cuda.kernels.offline import compile_launches

LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory per program, by compute capability: A100, L4 and RTX 40, H100, B200,
RTX 50."""
HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, CAPACITY = 4096, 32, 8, 128, 12288, 151936, 4096
"""Qwen3 8B. Smaller models use the same tiles over fewer terms."""
NARROW = 1024
"""The hidden size of Qwen3 0.6B, whose prompts use another tile."""
EXPERTS, TOP_K, EXPERT_INNER = 128, 8, 768
"""Qwen3 30B-A3B."""
ROWS = 1, 2, 24, 8192


def layer(rows: int, hidden: int, arithmetic: str) -> None:
    """Call one layer of a model, both decoding these rows and computing them as prompts."""
    kind = torch.float32 if arithmetic == "fp32" else torch.bfloat16
    new = partial(torch.empty, dtype=kind, device="meta")
    whole = partial(torch.empty, dtype=torch.int32, device="meta")
    exact, k = arithmetic != "close", close_kernels if arithmetic == "close" else exact_kernels
    x, norm = new(rows, hidden), new(hidden)
    qkv, out = new((HEADS + 2 * KV_HEADS) * DIM, hidden), new(hidden, HEADS * DIM)
    both, down = new(2 * INNER, hidden), new(hidden, INNER)
    attended, inner = new(rows, HEADS * DIM), new(rows, INNER)
    keys, values = new(3, KV_HEADS, CAPACITY, DIM), new(3, KV_HEADS, CAPACITY, DIM)
    places = keys, values, whole(rows), whole(rows), new(CAPACITY, DIM), new(CAPACITY, DIM)
    heads = {"q_norm": new(DIM), "k_norm": new(DIM), "eps": 1e-6}
    parts = exact_kernels.linear_parts if exact else close_kernels.linear
    delta: Tensor | None = None
    for source, weight in ((attended, out), (inner, down)):
        k.add_norm(x, delta, norm, 1e-6)
        if single_row.fits(x):
            for wide, gated in ((qkv, False), (both, True)):
                single_row.norm_linear(x, delta, norm, wide, eps=1e-6, gated=gated, exact=exact)
        delta = parts(source, weight)
    product = k.linear(x, qkv)
    blocks = whole(64, 4)
    if not exact:
        k.gate(k.linear(x, both), kind)
        close_kernels.attend(product, *places, 0.1, **heads)
        queries = prefill_kernels.store_heads(product, *places, 0.1, **heads)
        prefill_kernels.attend_ragged(queries, keys, values, blocks)
        return
    linear_gated(x, both)
    exact_kernels.linear(x, new(VOCAB, hidden))
    exact_attention.attend_tokens(product, *places, 0.1, **heads)
    queries = exact_kernels.store_heads(product, *places, **heads)
    exact_attention.attend_ragged(queries, keys, values, blocks, 0.1)
    mixed = new(EXPERTS, 2 * EXPERT_INNER, hidden), new(EXPERTS, hidden, EXPERT_INNER)
    experts.mix(x, whole(rows, TOP_K), new(rows, TOP_K), *mixed)
    config = ModelConfig.read(model_directory("tiny"))
    config = replace(config, hidden=hidden, intermediate=INNER, layers=1, vocab_size=VOCAB)
    bank = AdapterBank(config, 8, 64, keys)
    for inputs, module, outer in ((x, "gate_up", 2 * INNER), (inner, "down", hidden)):
        bank.add_to(new(rows, outer), inputs, whole(8, 3), 0, module)


def main() -> None:
    capability, arithmetics = int(sys.argv[1]), sys.argv[2:] or ["close", "exact", "fp32"]
    most: dict[str, tuple[int, int]] = {}
    rows = 0

    def measure(name: str, program: Any) -> None:
        most[name] = max(most.get(name, (0, 0)), (program.metadata.shared, rows))

    compile_launches(capability, measure)
    close_kernels.shared_memory = lambda device: LIMITS[capability]
    for arithmetic in arithmetics:
        for rows in ROWS:
            layer(rows, HIDDEN, arithmetic)
        layer(max(ROWS), NARROW, arithmetic)
    for name, needs in most.items():
        print(json.dumps([name, needs]))


if __name__ == "__main__":
    main()
