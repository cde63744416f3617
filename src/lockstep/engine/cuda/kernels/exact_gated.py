"""Exact SwiGLU product of few rows in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.engine.cuda.kernels import exact_kernels
from lockstep.engine.cuda.kernels.exact_kernels import _gate_value, gate, launch, linear

FEWEST, MOST = 17, 32
"""Row counts for which one launch is faster than two, measured on an H200."""
COLUMNS = 16
"""Outputs per program."""


def linear_gated(x: Tensor, weight: Tensor) -> Tensor:
    """Return `gate(linear(x, weight))`, in one launch for 17 to 32 rows of 16-bit values."""
    rows, width, inner = x.shape[0], weight.shape[0] // 2, x.shape[1]
    if not FEWEST <= rows <= MOST or x.element_size() != 2:
        return gate(linear(x, weight))
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    part = min(exact_kernels.PART, max(pow2(inner), 16))
    # A part of a single loop step would be fused into the running sum, which changes its order.
    block_k = min(256, part if inner <= part else part // 2)
    _linear_gated[(triton.cdiv(width, COLUMNS),)](
        x, weight, out, rows, inner=inner, width=width, part=part, block_m=MOST, block_n=COLUMNS,
        block_k=block_k, num_warps=2, num_stages=4, **launch(x),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear_gated(
    x, weight, out, rows, inner: tl.constexpr, width: tl.constexpr, part: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
    m, k = tl.arange(0, block_m), tl.arange(0, block_k)
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    some, real = (m < rows)[:, None], (n < width)[None, :]
    lines = x + m[:, None] * inner + k[None, :]
    columns = weight + n.to(tl.int64)[None, :] * inner + k[:, None]
    inside = (k < inner)[:, None]
    first = tl.load(columns, mask=real & inside, other=0.0)
    second = tl.load(columns + width * inner, mask=real & inside, other=0.0)
    if early:
        gdc_wait()
    a = tl.load(lines, mask=some & (k < inner)[None, :], other=0.0)
    total = tl.dot(a, first)
    total_up = tl.dot(a, second)
    for start in range(block_k, tl.minimum(part, inner), block_k):
        a, first, second = _gated_step(lines, columns, some, real, k, start, inner, width, block_k)
        total = tl.dot(a, first, total)
        total_up = tl.dot(a, second, total_up)
    if inner > part:
        for begin in range(part, inner, part):
            summed = tl.zeros((block_m, block_n), tl.float32)
            summed_up = tl.zeros((block_m, block_n), tl.float32)
            for start in range(begin, tl.minimum(begin + part, inner), block_k):
                a, first, second = _gated_step(
                    lines, columns, some, real, k, start, inner, width, block_k
                )
                summed = tl.dot(a, first, summed)
                summed_up = tl.dot(a, second, summed_up)
            total += summed
            total_up += summed_up
    kind = out.dtype.element_ty
    total, total_up = total.to(kind).to(tl.float32), total_up.to(kind).to(tl.float32)
    place = m[:, None] * width + n[None, :]
    tl.store(out + place, _gate_value(total, total_up, kind), mask=some & real)


@triton.jit
def _gated_step(
    lines, columns, some, real, k, start,
    inner: tl.constexpr, width: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Load terms of the rows, of the gate's columns and of the columns it gates."""
    if inner % block_k == 0:
        a = tl.load(lines + start, mask=some, other=0.0)
        first = tl.load(columns + start, mask=real, other=0.0)
        second = tl.load(columns + width * inner + start, mask=real, other=0.0)
    else:
        inside = k + start < inner
        a = tl.load(lines + start, mask=some & inside[None, :], other=0.0)
        first = tl.load(columns + start, mask=real & inside[:, None], other=0.0)
        second = tl.load(columns + width * inner + start, mask=real & inside[:, None], other=0.0)
    return a, first, second
