"""Compiles exact kernels for Hopper, without a GPU, and prints how their dots are computed.

    python -m tests.engine.cuda.kernels.compiled [fp32 | norms]

A line of JSON for each kernel: its name and, for every dot by `mma`, how many neighbouring terms a
thread holds of an operand; in fp32, the instructions that compute, and the bytes that did not fit
in registers; of norms in fp32, how the numbers of their sum lie in threads. Needs Triton without
its interpreter, so it is a program of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lockstep.engine.cuda.kernels import exact_attention, exact_gated, exact_kernels, single_row

KINDS = {
    **dict.fromkeys(("qkv", "keys", "values", "cos", "sin", "q_norm", "k_norm"), "*bf16"),
    **dict.fromkeys(("x", "norm", "weight", "out", "left", "q"), "*bf16"),
    **dict.fromkeys(("sums", "tops", "parts"), "*fp32"),
    **dict.fromkeys(("slots", "positions", "blocks"), "*i32"),
    **dict.fromkeys(("capacity", "slot_stride", "rows", "stride", "split_stride"), "i32"),
    "width": "i32",
    **dict.fromkeys(("eps", "scale"), "fp32"),
}
HEADS = {"kv_heads": 8, "group": 2, "dim": 128, "block": 64, "size": 128}
ROW = {"bias": None, "width": 1024, "splits": 2, "block": 1024, "part": 1024, "block_n": 16}
TILE = {"bias": None, "outer": 1024, "inner": 3072, "part": 1024, "ahead": True, "spread": True}


def compiled(kernel: Any, sizes: dict[str, Any], kind: str = "*bf16", **options: int) -> Any:
    """This kernel for numbers of a kind."""
    sizes = sizes | {"early": True}
    names = kernel.arg_names
    kinds = {name: each.replace("*bf16", kind) for name, each in KINDS.items()}
    signature = {name: "constexpr" if name in sizes else kinds[name] for name in names}
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
    return triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False, "launch_pdl": True, **options},
    )


def widths(kernel: Any, sizes: dict[str, Any], **options: int) -> list[str]:
    """The width of each operand of each dot of this kernel, in the order of the program."""
    program = compiled(kernel, sizes, **options)
    dots = [line for line in program.asm["ttgir"].splitlines() if "tt.dot " in line]
    return [width for line in dots for width in re.findall(r"kWidth = (\d+)", line)]


def instructions(kernel: Any, sizes: dict[str, Any], **options: int) -> tuple[list[str], int]:
    """What multiplies and adds in this kernel for fp32, and the bytes of its stack."""
    program = compiled(kernel, sizes, "*fp32", **options)
    found = re.findall(r"\b((?:fma|mul|add|wgmma|mma)\.[\w.]*f(?:32|64))", program.asm["ptx"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    stack = re.search(r"STACK:(\d+)", usage.stdout)
    return sorted(set(found)), -1 if stack is None else int(stack[1])


def fp32() -> dict[str, tuple[list[str], int]]:
    """Kernels of every tile that fp32 has."""
    heads = HEADS | {"block": exact_attention.KEYS_FP32}
    token = heads | {"splits": 6, "padded": 2}
    found = {
        "a token's attention": instructions(
            exact_attention._attend_tokens, token, num_warps=2, num_stages=2
        ),
        "attention": instructions(
            exact_attention._attend_ragged,
            heads | {"rows": exact_attention.QUERIES_FP32},
            num_warps=8,
            num_stages=2,
        ),
        "heads": instructions(exact_kernels._head_norm, {"dim": 128}),
    }
    for rows in (1, 32, 64, 8192):
        for outer, inner in ((4096, 1024), (1024, 3072)):
            tile = exact_kernels._tile_fp32(rows, outer, inner)
            block_m, block_n, block_k, warps, stages = tile
            few = rows <= exact_kernels.AHEAD
            sizes = TILE | {"outer": outer, "inner": inner, "ahead": few, "spread": few}
            sizes |= {"block_m": block_m, "block_n": block_n, "block_k": block_k}
            found[f"{rows} rows of {inner}"] = instructions(
                exact_kernels._linear, sizes, num_warps=warps, num_stages=stages
            )
    return found


def norms() -> dict[str, list[str]]:
    """How the numbers of the one sum that is the compiler's lie, by the parts added before."""
    found = {}
    for splits in (1, 2, 3):
        program = compiled(exact_kernels._add_norm, {"splits": splits, "block": 1024}, "*fp32")
        layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", program.asm["ttgir"], re.MULTILINE))
        sums = re.findall(r"tensor<1024xf32, (#\w+)>\) -> f32", program.asm["ttgir"])
        found[f"after {splits} parts"] = [layouts[name] for name in sums]
    return found


def main() -> None:
    if mode := sys.argv[1:]:
        for name, result in (fp32() if mode == ["fp32"] else norms()).items():
            print(json.dumps([name, result]))
        return
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
