"""Compiles exact kernels for Hopper, without a GPU, and prints how their dots read operands.

    python -m tests.engine.cuda.compiled

A line of JSON for each kernel: its name and, for every dot by `mma`, how many neighbouring terms a
thread holds of an operand. Needs Triton without its interpreter, so it is a program of its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lockstep.engine.cuda import exact_attention, exact_gated, exact_kernels, single_row

KINDS = {
    **dict.fromkeys(("qkv", "keys", "values", "cos", "sin", "q_norm", "k_norm"), "*bf16"),
    **dict.fromkeys(("x", "norm", "weight", "out", "left"), "*bf16"),
    **dict.fromkeys(("sums", "tops", "parts"), "*fp32"),
    **dict.fromkeys(("slots", "positions"), "*i32"),
    **dict.fromkeys(("capacity", "slot_stride", "rows"), "i32"),
    **dict.fromkeys(("eps", "scale"), "fp32"),
}
HEADS = {"kv_heads": 8, "group": 2, "dim": 128, "block": 64, "size": 128}
ROW = {"bias": None, "width": 1024, "splits": 2, "block": 1024, "part": 1024, "block_n": 16}
TILE = {"bias": None, "outer": 1024, "inner": 3072, "part": 1024, "ahead": True, "spread": True}


def widths(kernel: Any, sizes: dict[str, Any], **options: int) -> list[str]:
    """The width of each operand of each dot of this kernel, in the order of the program."""
    sizes = sizes | {"early": True}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in sizes else KINDS[name] for name in names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in sizes.items()},
        attrs=aligned,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False, "launch_pdl": True, **options},
    )
    dots = [line for line in compiled.asm["ttgir"].splitlines() if "tt.dot " in line]
    return [width for line in dots for width in re.findall(r"kWidth = (\d+)", line)]


def main() -> None:
    token = HEADS | {"splits": 6, "padded": 16}
    small = TILE | {"block_m": 1, "block_n": 8, "block_k": 1024}
    few = TILE | {"block_m": 16, "block_n": 16, "block_k": 1024}
    gated = {"inner": 1024, "width": 3072, "part": 1024, "block_m": 32, "block_n": 16}
    found = {
        "a token's attention": widths(exact_attention._attend_tokens, token, num_stages=2),
        "one row": widths(exact_kernels._linear, small, num_warps=1, num_stages=2),
        "few rows": widths(exact_kernels._linear, few, num_warps=2, num_stages=2),
        "one row, normed": widths(
            single_row._exact, ROW | {"outer": 4096, "gated": False}, num_warps=2
        ),
        "one row, normed and gated": widths(
            single_row._exact, ROW | {"outer": 3072, "gated": True}, num_warps=2
        ),
        "gated rows": widths(
            exact_gated._linear_gated, gated | {"block_k": 256}, num_warps=2, num_stages=4
        ),
    }
    for name, dots in found.items():
        print(json.dumps([name, dots]))


if __name__ == "__main__":
    main()
