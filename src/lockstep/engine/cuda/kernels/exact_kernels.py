"""Triton kernels whose bits do not depend on the batch, and their references in plain torch.

A row's bits are independent of other rows for these reasons:
- A product is one sum over the inner dimension, in order. Matrix instructions add 16 terms at a
  time whatever the tile (tested on Hopper: `mma` and `wgmma` agree in every shape).
- Softmax (`exact_attention`) works on splits of keys counted from the start of the sequence. Each
  split is computed separately, and splits are joined in order.
- Other sums over a row are computed by a single kernel, or in fp64, where squares of bf16 values
  add up without rounding.
- Every intermediate is rounded to the model's dtype where a trainer's module would round it.
- Multiplications and additions are not fused.

In fp32 a product is a chain of fused multiply-adds, one term after the other ("ieee"). That is what
users expect of fp32, and no tile can change it. The matrix units have no fp32. Three passes of TF32
would be nearly as accurate and faster, but their order depends on the tile. All terms of a step are
held in registers, so steps are short.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.engine.cuda.kernels.close_kernels import early

PART = 1024
"""Terms of a product that are summed separately, in order, before parts are added."""
AHEAD = 64
"""Largest batch for which a product loads weights before it waits for its input."""


def launch(tensor: Tensor) -> dict[str, Any]:
    """Return launch options for an exact kernel on the device of this tensor."""
    options = early(tensor.device)
    return options | ({"enable_fp_fusion": False} if tensor.is_cuda else {})


# Products


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return x @ weight.T + bias, summed over parts of `PART` terms in order and rounded once."""
    rows, outer = x.shape[0], weight.shape[0]
    if out is None:
        out = torch.empty((rows, outer), dtype=x.dtype, device=x.device)
    return _run(x, weight, bias, out, spread=False)


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T unrounded, fp32, as parts that `add_norm` sums in order.

    For few rows each part is a separate program, so that enough of them read weights.
    """
    rows, outer, inner = x.shape[0], weight.shape[0], x.shape[1]
    spread = rows <= AHEAD
    parts = triton.cdiv(inner, PART) if spread else 1
    out = torch.empty((parts, rows, outer), dtype=torch.float32, device=x.device)
    return _run(x, weight, None, out, spread=spread)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, spread: bool) -> Tensor:
    (rows, inner), outer = x.shape, weight.shape[0]
    tile = _tile_fp32 if x.dtype == torch.float32 else _tile
    block_m, block_n, block_k, warps, stages = tile(rows, outer, inner)
    # The part size depends on the weight alone, never on the number of rows or the tile.
    part = min(PART, max(pow2(inner), 16))
    splits = triton.cdiv(inner, part) if spread else 1
    if splits == 1 and inner > part:
        # A part of a single loop step would be fused into the running sum: the compiler adds its
        # dot to `total` directly, term by term, instead of adding the part's own sum.
        block_k = min(block_k, part // 2)
    _linear[(triton.cdiv(rows, block_m), triton.cdiv(outer, block_n), splits)](
        x, weight, bias, out, rows, inner=inner, outer=outer, part=part,
        block_m=block_m, block_n=block_n, block_k=min(block_k, part),
        ahead=rows <= AHEAD, spread=spread, num_warps=warps, num_stages=stages, **launch(x),
    )  # fmt: skip
    return out


def _tile(rows: int, outer: int, inner: int) -> tuple[int, int, int, int, int]:
    """Return rows, columns and depth of a tile, warps and stages. Only speed depends on them.

    Measured on an H200, with weights that are not in its cache.
    """
    wide = outer > 8192  # the head
    if rows == 1:
        if wide:
            return 1, 64, 256, 4, 4
        return (1, 8, 1024, 1, 2) if outer <= 2048 else (1, 32, 1024, 4, 2)
    if rows <= 16:
        return (16, 32, 256, 4, 4) if wide else (16, 16, 1024, 2, 2)
    if rows <= 32:
        return (32, 64, 128, 4, 4) if wide else (32, 16, 1024, 4, 1)
    if rows <= 64:
        return (64, 128, 64, 4, 4) if wide else (64, 32, 128, 4, 4)
    if rows <= 256:
        if outer <= 2048:
            return 64, 32, 128, 4, 4
        return (64, 64, 128, 4, 3) if outer <= 4096 else (128, 128, 64, 8, 4)
    if rows <= 1024 and outer <= 2048:
        return 128, 64, 64, 4, 4
    # Several parts need two sums in registers, where a larger tile would not fit.
    return (128, 128, 64, 8, 4) if rows <= 1024 or inner > PART else (128, 256, 64, 8, 3)


def _tile_fp32(rows: int, outer: int, inner: int) -> tuple[int, int, int, int, int]:
    """Return the tile of an fp32 product, a chain of multiply-adds that needs no 16 rows.

    Few warps and short steps: values are in shared memory in the model's layout, where threads of a
    warp read the same banks, and more warps would only wait for each other. Compiled for Hopper,
    none of these tiles spills registers.
    """
    narrow, wide = outer <= 2048, outer > 8192
    if rows <= 8:  # nearly all programs run at once, so each prefetches many weights
        return (pow2(rows), 16, 32, 1, 14) if narrow else (pow2(rows), 32, 16, 1, 8 if wide else 14)
    if rows <= 32:
        return pow2(rows), 16 if narrow else 32, 16, 1 if wide else 2, 6
    if rows <= 64 or (rows <= 256 and narrow):
        return 64, 32, 16, 2, 4
    return (128, 32, 16, 4, 4) if inner > PART else (128, 64, 16, 4, 4)


@triton.jit
def _part(
    lines, columns, some, real, begin, end, summed, inner: tl.constexpr, block_k: tl.constexpr
):  # fmt: skip
    """Return `summed` plus the products of terms [begin, end), added in order."""
    k = tl.arange(0, block_k)
    for start in range(begin, tl.minimum(end, inner), block_k):
        if inner % block_k == 0:
            a = tl.load(lines + start, mask=some, other=0.0)
            b = tl.load(columns + start, mask=real, other=0.0)
        else:
            inside = k + start < inner
            a = tl.load(lines + start, mask=some & inside[None, :], other=0.0)
            b = tl.load(columns + start, mask=real & inside[:, None], other=0.0)
        summed = tl.dot(a, b, summed, input_precision="ieee")
    return summed


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows, inner: tl.constexpr, outer: tl.constexpr, part: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, ahead: tl.constexpr,
    spread: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    split = tl.program_id(2)
    some, real = (m < rows)[:, None], (n < outer)[None, :]
    lines = x + m.to(tl.int64)[:, None] * inner + k[None, :]
    columns = weight + n.to(tl.int64)[None, :] * inner + k[:, None]
    first = split * part
    begin = first
    total = tl.zeros((block_m, block_n), tl.float32)
    if ahead:
        # A small batch is limited by reading weights: load the first before waiting for x.
        b = tl.load(columns + first, mask=real & (k + first < inner)[:, None], other=0.0)
        if early:
            gdc_wait()
        a = tl.load(lines + first, mask=some & (k + first < inner)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        begin += block_k
    elif early:
        gdc_wait()
    total = _part(lines, columns, some, real, begin, first + part, total, inner, block_k)
    if not spread and inner > part:
        for begin in range(part, inner, part):
            summed = tl.zeros((block_m, block_n), tl.float32)
            end = begin + part
            total += _part(lines, columns, some, real, begin, end, summed, inner, block_k)
    if bias is not None:
        total += tl.load(bias + n, mask=n < outer, other=0.0).to(tl.float32)[None, :]
    place = (split.to(tl.int64) * rows + m)[:, None] * outer + n[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=some & real)


# Norms


def add_norm(x: Tensor, parts: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x plus the rounded sum of `parts`. The sum is stored in x.

    Without parts, one row of zeros is added, so that the kernel performs the same loads in every
    use.
    """
    rows, width = x.shape
    out = torch.empty_like(x)
    stride, splits = width, 1
    if parts is None:
        parts, stride = torch.zeros(width, dtype=torch.float32, device=x.device), 0
    else:
        splits = parts.shape[0]
    _add_norm[(rows,)](
        x, parts, weight, out, width, stride, rows * width, eps,
        splits=splits, block=pow2(width), num_warps=4, **launch(x),
    )  # fmt: skip
    return out


@triton.jit
def _size(value, width, eps):
    """Return the RMSNorm factor of a row.

    Two kernels compute this sum for 16-bit dtypes. They use fp64, where the squares add up without
    rounding, so their order does not matter. Only one kernel computes it for fp32, in its
    compiler's order.
    """
    if value.dtype == tl.float32:
        return tl.rsqrt(tl.sum(value * value) / width + eps)
    wide = value.to(tl.float64)
    return tl.rsqrt((tl.sum(wide * wide) / width).to(tl.float32) + eps)


@triton.jit
def _add_norm(
    x, parts, weight, out, width, stride, split_stride, eps,
    splits: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
    at = tl.arange(0, block)
    inside = at < width
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if early:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kind = x.dtype.element_ty
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    source = parts + row * stride + at
    added = tl.load(source, mask=inside, other=0.0)
    for split in tl.static_range(1, splits):
        added += tl.load(source + split * split_stride, mask=inside, other=0.0)
    value = (value + added.to(kind).to(tl.float32)).to(kind)
    tl.store(x + row * width + at, value, mask=inside)
    size = _size(value, width, eps)
    value = value.to(tl.float32)
    tl.store(out + row * width + at, (value * size * scale).to(kind), mask=inside)


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of the rows of x, each a head, with the bits it has in `store_heads`."""
    rows, dim = x.shape
    out = torch.empty_like(x)
    _head_norm[(triton.cdiv(rows, 16),)](x, weight, out, rows, eps, dim=dim, **launch(x))
    return out


@triton.jit
def _normed(low, high, norm, eps, kind: tl.constexpr, dim: tl.constexpr):
    """Return rows of heads as two halves, normed and rounded.

    Two kernels compute this sum, and their compilers may choose different orders. It is computed in
    fp64, where squares of bf16 values add up without rounding. Squares of fp32 values would be
    rounded, so they are summed by a product with ones, which is a chain in order.
    """
    half: tl.constexpr = dim // 2
    at = tl.arange(0, half)
    if kind == tl.float32:
        ones = tl.full((half, 16), 1.0, tl.float32)
        squares = tl.dot(low * low, ones, input_precision="ieee")
        squares = tl.dot(high * high, ones, squares, input_precision="ieee")
        one = (tl.arange(0, 16) == 0)[None, :]  # all columns are equal  # prose: allow
        squares = tl.sum(tl.where(one, squares, 0.0), axis=1)
        size = tl.rsqrt(squares / dim + eps)[:, None]
    else:
        wide_low, wide_high = low.to(tl.float64), high.to(tl.float64)
        squares = tl.sum(wide_low * wide_low, axis=1) + tl.sum(wide_high * wide_high, axis=1)
        size = tl.rsqrt((squares / dim).to(tl.float32) + eps)[:, None]
    low = low * size * tl.load(norm + at).to(tl.float32)[None, :]
    high = high * size * tl.load(norm + half + at).to(tl.float32)[None, :]
    return low.to(kind), high.to(kind)


@triton.jit(do_not_specialize=["rows"])
def _head_norm(x, norm, out, rows, eps, dim: tl.constexpr, early: tl.constexpr):
    if early:
        gdc_launch_dependents()
        gdc_wait()
    half: tl.constexpr = dim // 2
    row = tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16)
    place = row[:, None] * dim + tl.arange(0, half)[None, :]
    real = (row < rows)[:, None]
    low = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    high = tl.load(x + place + half, mask=real, other=0.0).to(tl.float32)
    low, high = _normed(low, high, norm, eps, out.dtype.element_ty, dim)
    tl.store(out + place, low, mask=real)
    tl.store(out + place + half, high, mask=real)


# The gate


def gate(both: Tensor) -> Tensor:
    """Return silu(gate) * up of rows that hold the two side by side. The SiLU is rounded first."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, width), dtype=both.dtype, device=both.device)
    block = 1024
    _gate[(rows, triton.cdiv(width, block))](both, out, width, block=block, **launch(both))
    return out


def silu(x: Tensor) -> Tensor:
    """Return the SiLU of x, with the bits it has in `gate`."""
    out, block = torch.empty_like(x), 1024
    _silu_all[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), block=block, **launch(x))
    return out


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gate_value(first, second, kind: tl.constexpr):
    """Return silu(first) * second, rounded where a transformers module rounds."""
    return (_silu(first).to(kind).to(tl.float32) * second).to(kind)


@triton.jit
def _gate(both, out, width, block: tl.constexpr, early: tl.constexpr):
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    kind = out.dtype.element_ty
    first = tl.load(both + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(both + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, _gate_value(first, second, kind), mask=inside)


@triton.jit
def _silu_all(x, out, count, block: tl.constexpr, early: tl.constexpr):
    if early:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, _silu(value).to(out.dtype.element_ty), mask=at < count)


# Heads


def store_heads(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Return normed and rotated queries (rows, heads * dim), and write keys and values to slots.

    `cos` and `sin` are in the model's dtype, and every step of the rotation is rounded to it.
    Nothing is stored for a row whose slot is negative.
    """
    rows, width = qkv.shape
    _, kv_heads, capacity, dim = keys.shape
    heads = width // dim - 2 * kv_heads
    out = torch.empty((rows, heads * dim), dtype=keys.dtype, device=keys.device)
    _store_heads[(rows,)](
        qkv, out, keys, values, slots, positions, cos, sin, q_norm, k_norm,
        eps, capacity, keys.stride(0), heads=heads, kv_heads=kv_heads, dim=dim,
        q_rows=pow2(heads), k_rows=pow2(kv_heads), num_warps=4, **launch(keys),
    )  # fmt: skip
    return out


@triton.jit
def _turned(x, cos, sin, norm, rows, real, eps, dim: tl.constexpr):
    """Return the heads of one token as two halves, normed if there is a weight, and rotated."""
    half: tl.constexpr = dim // 2
    kind = x.dtype.element_ty
    at = tl.arange(0, half)
    place = rows[:, None] * dim + at[None, :]
    low = tl.load(x + place, mask=real[:, None], other=0.0).to(tl.float32)
    high = tl.load(x + place + half, mask=real[:, None], other=0.0).to(tl.float32)
    if norm is not None:
        low, high = _normed(low, high, norm, eps, kind, dim)
        low, high = low.to(tl.float32), high.to(tl.float32)
    c = tl.load(cos + at).to(tl.float32)[None, :]
    s = tl.load(sin + at).to(tl.float32)[None, :]
    low_c, low_s = (low * c).to(kind).to(tl.float32), (low * s).to(kind).to(tl.float32)
    high_c, high_s = (high * c).to(kind).to(tl.float32), (high * s).to(kind).to(tl.float32)
    return (low_c - high_s).to(kind), (high_c + low_s).to(kind)


@triton.jit
def _store_heads(
    qkv, out, keys, values, slots, positions, cos, sin, q_norm, k_norm, eps, capacity, slot_stride,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr,
    q_rows: tl.constexpr, k_rows: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = dim // 2
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    qkv += row * (heads + 2 * kv_heads) * dim
    cos += position * dim
    sin += position * dim
    part, at = tl.arange(0, half), tl.arange(0, dim)
    lane = tl.arange(0, q_rows)
    real = lane < heads
    low, high = _turned(qkv, cos, sin, q_norm, lane, real, eps, dim)
    place = out + row * heads * dim + lane[:, None] * dim + part[None, :]
    tl.store(place, low, mask=real[:, None])
    tl.store(place + half, high, mask=real[:, None])
    lane = tl.arange(0, k_rows)
    real = lane < kv_heads
    low, high = _turned(qkv, cos, sin, k_norm, heads + lane, real, eps, dim)
    kept = (tl.where(slot >= 0, lane, kv_heads) < kv_heads)[:, None]  # prose: allow
    first = slot * slot_stride + lane * capacity * dim + position * dim
    place = keys + first[:, None] + part[None, :]
    tl.store(place, low, mask=kept)
    tl.store(place + half, high, mask=kept)
    source = (heads + kv_heads + lane)[:, None] * dim + at[None, :]
    value = tl.load(qkv + source, mask=real[:, None], other=0.0)
    tl.store(values + first[:, None] + at[None, :], value, mask=kept)
