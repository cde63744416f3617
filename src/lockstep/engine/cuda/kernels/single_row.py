"""Triton kernels for a batch of one row, which fuse the norm into the product that reads it.

With one row, a launch takes longer than its computation. Every program computes the norm itself,
while the weights it requested before are loading.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.engine.cuda.kernels import exact_kernels
from lockstep.engine.cuda.kernels.close_kernels import early
from lockstep.engine.cuda.kernels.exact_kernels import _gate_value, _size

WIDEST = 4096
"""Largest row width that one program holds in full."""
NARROW = 4
"""Outputs per program in close arithmetic."""
TILE = 16
"""Outputs per program in exact arithmetic, by matrix instructions."""


def fits(x: Tensor) -> bool:
    """Return whether these kernels support x: one row of 16-bit values, at most WIDEST wide."""
    return bool(x.shape[0] == 1 and x.shape[1] <= WIDEST and x.element_size() == 2)


def norm_linear(
    x: Tensor,
    parts: Tensor | None,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    gated: bool = False,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """Return x plus the sum of `parts`, and the RMSNorm of that times weight.T, plus bias.

    With `gated`, the first half of the outputs gates the second. In exact arithmetic the bits are
    those of `add_norm`, `linear` and `gate` of `exact_kernels`. In close arithmetic the product is
    not rounded, unless it is gated.
    """
    width, outer = x.shape[1], weight.shape[0] // (2 if gated else 1)
    kind = x.dtype if gated or exact else torch.float32
    out = torch.empty((1, outer), dtype=kind, device=x.device)
    left = torch.empty_like(x)
    splits = 0 if parts is None else parts.shape[0]
    sizes = {"width": width, "outer": outer, "splits": splits, "gated": gated}
    tensors = x, parts, norm, weight, bias, out, left
    if not exact:
        _close[(triton.cdiv(outer, NARROW),)](
            *tensors, eps, **sizes, block=pow2(width), block_n=NARROW, num_warps=4,
            **early(x.device),
        )  # fmt: skip
        return left, out
    part = min(exact_kernels.PART, max(pow2(width), 16))
    _exact[(triton.cdiv(outer, TILE),)](
        *tensors, eps, **sizes, block=pow2(width), part=part, block_n=TILE,
        num_warps=2, **exact_kernels.launch(x),
    )  # fmt: skip
    return left, out


@triton.jit
def _row(x, parts, at, inside, width, splits: tl.constexpr, exact: tl.constexpr):
    """Return these values of the row with all parts added."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if splits:
        added = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
        for split in tl.static_range(1, splits):
            added += tl.load(parts + split * width + at, mask=inside, other=0.0).to(tl.float32)
        if exact:  # rounded where a trainer's module rounds
            added = added.to(x.dtype.element_ty).to(tl.float32)
            value = (value + added).to(x.dtype.element_ty).to(tl.float32)
        else:
            value += added
    return value


@triton.jit
def _close(
    x, parts, norm, weight, bias, out, left, eps,
    width: tl.constexpr, outer: tl.constexpr, splits: tl.constexpr, gated: tl.constexpr,
    block: tl.constexpr, block_n: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    at = tl.arange(0, block)
    inside = at < width
    real = (n < outer)[:, None] & inside[None, :]
    tile = weight + n[:, None] * width + at[None, :]
    first = tl.load(tile, mask=real, other=0.0)
    if gated:
        second = tl.load(tile + outer * width, mask=real, other=0.0)
    scale = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    if early:
        gdc_wait()
    value = _row(x, parts, at, inside, width, splits, False)
    if tl.program_id(0) == 0:
        tl.store(left + at, value.to(left.dtype.element_ty), mask=inside)
    size = tl.rsqrt(tl.sum(value * value) / width + eps)
    normed = (value * size * scale).to(x.dtype.element_ty).to(tl.float32)[None, :]
    total = tl.sum(first.to(tl.float32) * normed, axis=1)
    if bias is not None:
        total += tl.load(bias + n, mask=n < outer, other=0.0).to(tl.float32)
    if gated:
        other = tl.sum(second.to(tl.float32) * normed, axis=1)
        total = total / (1 + tl.exp(-total)) * other
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < outer)


@triton.jit
def _exact(
    x, parts, norm, weight, bias, out, left, eps,
    width: tl.constexpr, outer: tl.constexpr, splits: tl.constexpr, gated: tl.constexpr,
    block: tl.constexpr, part: tl.constexpr, block_n: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
    # A part of a single dot would be fused into the running sum: see `_run` of `exact_kernels`.
    step: tl.constexpr = part if width <= part else part // 2
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    at, k = tl.arange(0, block), tl.arange(0, step)
    inside = at < width
    real = (n < outer)[None, :]
    columns = weight + n.to(tl.int64)[None, :] * width + k[:, None]
    first = tl.load(columns, mask=real & (k < width)[:, None], other=0.0)
    if gated:
        columns_up = columns + outer * width
        second = tl.load(columns_up, mask=real & (k < width)[:, None], other=0.0)
    if early:
        gdc_wait()
    value = _row(x, parts, at, inside, width, splits, True)
    if tl.program_id(0) == 0:
        tl.store(left + at, value.to(left.dtype.element_ty), mask=inside)
    kind = x.dtype.element_ty
    size = _size(value.to(kind), width, eps)
    total = tl.zeros((1, block_n), tl.float32)
    total_up = tl.zeros((1, block_n), tl.float32)
    for begin in tl.static_range(0, width, part):
        summed = tl.zeros((1, block_n), tl.float32)
        summed_up = tl.zeros((1, block_n), tl.float32)
        for start in tl.static_range(begin, begin + part, step):
            if start < width:
                where = start + k
                there = where < width
                scale = tl.load(norm + where, mask=there, other=0.0).to(tl.float32)
                if step == block:  # noqa: SIM108 (decided at compile time)
                    row = value
                else:
                    row = _row(x, parts, where, there, width, splits, True)
                row = (row * size * scale).to(kind)[None, :]
                if start > 0:
                    first = tl.load(columns + start, mask=real & there[:, None], other=0.0)
                summed = tl.dot(row, first, summed)
                if gated:
                    if start > 0:
                        second = tl.load(columns_up + start, mask=real & there[:, None], other=0.0)
                    summed_up = tl.dot(row, second, summed_up)
        if begin == 0:
            total, total_up = summed, summed_up
        else:
            total += summed
            total_up += summed_up
    if bias is not None:
        total += tl.load(bias + n, mask=n < outer, other=0.0).to(tl.float32)[None, :]
    total = total.to(kind)
    if gated:
        total = _gate_value(total.to(tl.float32), total_up.to(kind).to(tl.float32), kind)
    tl.store(out + n[None, :], total, mask=real)
