"""Compiles exact kernels for Hopper, without a GPU, and prints how they compute.

    python -m tests.engine.cuda.kernels.compiled [fp32 | norms]

Prints a line of JSON for each kernel: its name and, for every dot by `mma`, how many neighbouring
terms a thread holds of an operand; with fp32, the arithmetic instructions, and the bytes that did
not fit in registers; with norms, how the values of an fp32 sum are distributed over threads.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.engine.cuda.kernels import exact_attention, exact_gated, exact_kernels, single_row
from tests.engine.cuda.kernels.offline import compile_launches

HIDDEN, HEADS, KV_HEADS, DIM, INNER, CAPACITY = 1024, 16, 8, 128, 3072, 768
"""Qwen3 0.6B."""
new = partial(torch.empty, device="meta")
programs: dict[str, Any] = {}
"""The last program compiled of each kernel, by name."""


def compiled(name: str, call: Callable[[], object]) -> Any:
    """Return the program of the kernel `name` that a call of the engine launches."""
    programs.clear()
    call()
    return programs[name]


def widths(program: Any) -> list[str]:
    """Return the width of each operand of each dot of a program, in order."""
    dots = [line for line in program.asm["ttgir"].splitlines() if "tt.dot " in line]
    return [width for line in dots for width in re.findall(r"kWidth = (\d+)", line)]


def instructions(program: Any) -> tuple[list[str], int]:
    """Return the instructions of a program that multiply and add, and the bytes of its stack."""
    names = re.findall(r"\b((?:fma|mul|add|wgmma|mma)\.[\w.]*f(?:32|64))", program.asm["ptx"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    stack = re.search(r"STACK:(\d+)", usage.stdout)
    return sorted(set(names)), -1 if stack is None else int(stack[1])


def token_attention(kind: torch.dtype) -> Any:
    """Return the program for the attention of one token."""
    cache = [new(3, KV_HEADS, CAPACITY, DIM, dtype=kind) for _ in range(2)]
    places = [new(1, dtype=torch.int32) for _ in range(2)]
    turns = [new(CAPACITY, DIM, dtype=kind) for _ in range(2)]
    qkv, norm = new(1, (HEADS + 2 * KV_HEADS) * DIM, dtype=kind), new(DIM, dtype=kind)
    call = partial(exact_attention.attend_tokens, q_norm=norm, k_norm=norm, eps=1e-6)
    return compiled(
        "exact_attention._attend_tokens", lambda: call(qkv, *cache, *places, *turns, 0.1)
    )


def product(kind: torch.dtype, rows: int, outer: int, inner: int) -> Any:
    """Return the program for a product of these sizes."""
    x, weight = new(rows, inner, dtype=kind), new(outer, inner, dtype=kind)
    return compiled("exact_kernels._linear", lambda: exact_kernels.linear_parts(x, weight))


def dots() -> dict[str, list[str]]:
    """Return the widths of all dots of the kernels that serve few rows."""
    x, norm = new(1, HIDDEN, dtype=torch.bfloat16), new(HIDDEN, dtype=torch.bfloat16)
    qkv, both = (new(outer, HIDDEN, dtype=torch.bfloat16) for outer in (4096, 2 * INNER))
    parts = new(2, 1, HIDDEN, dtype=torch.float32)
    normed = partial(single_row.norm_linear, x, parts, norm, eps=1e-6, exact=True)
    few = new(32, HIDDEN, dtype=torch.bfloat16)
    found = {
        "a token's attention": token_attention(torch.bfloat16),
        "one row": product(torch.bfloat16, 1, HIDDEN, INNER),
        "few rows": product(torch.bfloat16, 16, HIDDEN, INNER),
        "one row, normed": compiled("single_row._exact", lambda: normed(qkv)),
        "one row, normed and gated": compiled(
            "single_row._exact", lambda: normed(both, gated=True)
        ),
        "gated rows": compiled(
            "exact_gated._linear_gated", lambda: exact_gated.linear_gated(few, both)
        ),
    }
    return {name: widths(program) for name, program in found.items()}


def fp32() -> dict[str, tuple[list[str], int]]:
    """Return the instructions of kernels with every tile of fp32."""
    kind = torch.float32
    q, cache = new(8, HEADS * DIM, dtype=kind), new(3, KV_HEADS, CAPACITY, DIM, dtype=kind)
    blocks, heads = new(4, 4, dtype=torch.int32), new(64, DIM, dtype=kind)
    found = {
        "a token's attention": token_attention(kind),
        "attention": compiled(
            "exact_attention._attend_ragged",
            lambda: exact_attention.attend_ragged(q, cache, cache, blocks, 0.1),
        ),
        "heads": compiled(
            "exact_kernels._head_norm",
            lambda: exact_kernels.head_norm(heads, new(DIM, dtype=kind), 1e-6),
        ),
    }
    for rows in (1, 32, 64, 8192):
        for outer, inner in ((4096, 1024), (1024, 3072)):
            found[f"{rows} rows of {inner}"] = product(kind, rows, outer, inner)
    return {name: instructions(program) for name, program in found.items()}


def norms() -> dict[str, list[str]]:
    """Return the layout of the one sum whose order is the compiler's, by the parts added before."""
    x, weight = new(8, HIDDEN, dtype=torch.float32), new(HIDDEN, dtype=torch.float32)
    found = {}
    for splits in (1, 2, 3):
        parts: Tensor = new(splits, 8, HIDDEN, dtype=torch.float32)
        program = compiled(
            "exact_kernels._add_norm",
            lambda parts=parts: exact_kernels.add_norm(x, parts, weight, 1e-6),
        )
        layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", program.asm["ttgir"], re.MULTILINE))
        sums = re.findall(r"tensor<1024xf32, (#\w+)>\) -> f32", program.asm["ttgir"])
        found[f"after {splits} parts"] = [layouts[name] for name in sums]
    return found


def main() -> None:
    compile_launches(90, programs.__setitem__)
    mode = sys.argv[1] if sys.argv[1:] else "dots"
    for name, result in {"dots": dots, "fp32": fp32, "norms": norms}[mode]().items():
        print(json.dumps([name, result]))


if __name__ == "__main__":
    main()
