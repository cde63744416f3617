"""Triton kernels for decoding on a CUDA device: a step of one token per row in few launches.

All kernels use the cache in its slots without copying. Sizes that change from token to token
(positions) are read from device memory, so one captured graph serves every step. Sums are fp32.

A kernel may start while the previous one is still running (programmatic dependent launch). It first
loads what no kernel of the step writes, such as weights and older keys, and then waits for its
inputs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FEW = 32
"""Largest batch for which this kernel beats cuBLAS: it is limited by reading weights."""
NARROW = 4
"""Outputs per program for a single row."""
MOST_SPLITS = 8
SPLIT_TARGET = 512
"""Minimum number of programs per attention launch, to keep every multiprocessor reading."""
BLOCK = 32
"""Keys that an attention program reads per iteration."""
LOG2_E = 1.4426950408889634


def early(device: torch.device) -> dict[str, Any]:
    """Return launch options: programmatic dependent launch on devices that support it."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"early": True, "launch_pdl": True} if able else {"early": False}


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory available to one program on this device."""
    if device.type != "cuda":
        return sys.maxsize
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias as parts (splits, rows, outer) that the reader sums.

    For few rows the inner dimension is split, so that enough programs read weights.
    """
    rows, inner = x.shape
    if rows > FEW:
        return F.linear(x, weight, bias)[None]
    outer = weight.shape[0]
    block_m, block_n, block_k, warps = 1, NARROW, 1024, 4
    if rows > 1:
        block_m, block_n, block_k = max(16, pow2(rows)), 64, 512
        warps = 8 if rows > 16 and outer <= 4096 else 4
    blocks = triton.cdiv(inner, block_k)
    per_split = triton.cdiv(blocks, MOST_SPLITS)
    splits, part = triton.cdiv(blocks, per_split), per_split * block_k
    out = torch.empty((splits, rows, outer), dtype=torch.float32, device=x.device)
    # Prefetch two iterations, or one if shared memory is too small: Hopper has 227 KiB, an A100
    # 163 KiB, consumer GPUs 99 KiB.
    ahead = 2 * (block_m + block_n) * block_k * x.element_size()
    stages = 3 if per_split == 1 or ahead <= shared_memory(x.device) else 2
    _linear[(triton.cdiv(outer, block_n), splits)](
        x, weight, bias, out, rows, inner, outer, part,
        block_m=block_m, block_n=block_n, block_k=min(block_k, pow2(inner)),
        num_warps=warps, num_stages=stages, **early(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])  # else every batch size would be compiled separately
def _linear(
    x, weight, bias, out, rows, inner: tl.constexpr, outer: tl.constexpr, part: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
    split = tl.program_id(1)
    m = tl.arange(0, block_m)
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    k = split * part + tl.arange(0, block_k)
    end = tl.minimum(inner, (split + 1) * part)
    tile = weight + n[:, None] * inner + k[None, :]
    real = (n < outer)[:, None]
    first = tl.load(tile, mask=real & (k < end)[None, :], other=0.0)
    if early:
        gdc_wait()
    lines = x + m[:, None] * inner
    some = (m < rows)[:, None]
    values = tl.load(lines + k[None, :], mask=some & (k < end)[None, :], other=0.0)
    total = _product(values, first, block_m)
    for start in range(block_k, part, block_k):
        at = k + start
        inside = (at < end)[None, :]
        values = tl.load(lines + at[None, :], mask=some & inside, other=0.0)
        total += _product(values, tl.load(tile + start, mask=real & inside, other=0.0), block_m)
    if bias is not None:  # noqa: SIM102 (decided at compile time, the other at run time)
        if split == 0:
            total += tl.load(bias + n, mask=n < outer, other=0.0).to(tl.float32)[None, :]
    place = (split * rows + m)[:, None] * outer + n[None, :]
    tl.store(out + place, total, mask=some & (n < outer)[None, :])


@triton.jit
def _product(x, weight, rows: tl.constexpr):
    """Return x @ weight.T. Matrix units need 16 rows, so a single row is summed directly."""
    if rows == 1:
        return tl.sum(x.to(tl.float32) * weight.to(tl.float32), axis=1)[None, :]
    return tl.dot(x, tl.trans(weight))


@triton.jit
def _sum(parts, stride, place, inside, splits: tl.constexpr):
    """Return the values at `place`, summed over all parts."""
    total = tl.load(parts + place, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, splits):
        total += tl.load(parts + split * stride + place, mask=inside, other=0.0).to(tl.float32)
    return total


def add_norm(x: Tensor, parts: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x plus the sum of `parts`. The sum is stored in x."""
    rows, width = x.shape
    out = torch.empty_like(x)
    _add_norm[(rows,)](
        x, parts, weight, out, rows * width, width, eps,
        splits=1 if parts is None else parts.shape[0], block=pow2(width),
        num_warps=4, **early(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _add_norm(
    x, parts, weight, out, stride, width, eps,
    splits: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
    at = tl.arange(0, block)
    inside = at < width
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if early:
        gdc_wait()
    place = tl.program_id(0) * width + at
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if parts is not None:
        value += _sum(parts, stride, place, inside, splits)
        tl.store(x + place, value.to(x.dtype.element_ty), mask=inside)
    size = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(out + place, (value * size * scale).to(out.dtype.element_ty), mask=inside)


def gate(parts: Tensor, kind: torch.dtype) -> Tensor:
    """Return silu(gate) * up of rows that hold the two side by side."""
    splits, rows, both = parts.shape
    width = both // 2
    out = torch.empty((rows, width), dtype=kind, device=parts.device)
    _gate[(rows, triton.cdiv(width, 512))](
        parts, out, rows * both, width, splits=splits, block=512, **early(parts.device)
    )
    return out


@triton.jit
def _gate(
    parts, out, stride, width, splits: tl.constexpr, block: tl.constexpr, early: tl.constexpr
):  # fmt: skip
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    place = row * 2 * width + at
    first = _sum(parts, stride, place, inside, splits)
    second = _sum(parts, stride, place + width, inside, splits)
    value = first / (1 + tl.exp(-first)) * second
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=inside)


def attend(
    parts: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return the attention of one new token per row, and write its key and value to its slot.

    The sum of `parts` is (rows, (heads + 2 kv_heads) * dim). `keys` and `values` are the cache of
    one layer, (slots, kv_heads, capacity, dim); row r reads slot slots[r] before position
    positions[r]. The key is rotated before it is stored.
    """
    pieces, rows, width = parts.shape
    _, kv_heads, capacity, dim = keys.shape
    heads = width // dim - 2 * kv_heads
    splits = min(32, pow2(triton.cdiv(SPLIT_TARGET, rows * kv_heads)))
    out = torch.empty((rows, heads * dim), dtype=keys.dtype, device=keys.device)
    whole = splits == 1
    sums = out if whole else out.new_empty((rows, heads, splits, dim), dtype=torch.float32)
    tops = out if whole else out.new_empty((rows, heads, splits, 2), dtype=torch.float32)
    launch = early(keys.device)
    _attend[(splits, kv_heads, rows)](
        parts, keys, values, slots, positions, cos, sin, q_norm, k_norm, out, sums, tops,
        scale * LOG2_E, eps, capacity, keys.stride(0), rows * width,
        kv_heads=kv_heads, group=heads // kv_heads, dim=dim, splits=splits, pieces=pieces,
        padded=max(16, pow2(heads // kv_heads)), block=BLOCK, num_warps=4, num_stages=3,
        **launch,
    )  # fmt: skip
    if not whole:
        _combine[(heads, rows)](sums, tops, out, dim=dim, splits=splits, num_warps=1, **launch)
    return out


@triton.jit
def _halves(
    parts, stride, rows, real, norm, cos, sin, eps, dim: tl.constexpr, pieces: tl.constexpr
):  # fmt: skip
    """Return rows of `dim` values as two halves, normed if there is a weight, and rotated."""
    half: tl.constexpr = dim // 2
    at = tl.arange(0, half)
    place = rows[:, None] * dim + at[None, :]
    low = _sum(parts, stride, place, real[:, None], pieces)
    high = _sum(parts, stride, place + half, real[:, None], pieces)
    if norm is not None:
        size = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / dim + eps)
        low *= size[:, None] * tl.load(norm + at).to(tl.float32)[None, :]
        high *= size[:, None] * tl.load(norm + half + at).to(tl.float32)[None, :]
    c, s = tl.load(cos + at).to(tl.float32)[None, :], tl.load(sin + at).to(tl.float32)[None, :]
    return low * c - high * s, high * c + low * s


@triton.jit
def _read(keys, values, start, end, dim: tl.constexpr, block: tl.constexpr):
    """Return a block of keys, as two halves transposed for a product, and of values."""
    half: tl.constexpr = dim // 2
    where = start + tl.arange(0, block)
    known = where < end  # prose: allow
    turned = keys + where[None, :] * dim + tl.arange(0, half)[:, None]
    low = tl.load(turned, mask=known[None, :], other=0.0)
    high = tl.load(turned + half, mask=known[None, :], other=0.0)
    rows = values + where[:, None] * dim + tl.arange(0, dim)[None, :]
    return low, high, tl.load(rows, mask=known[:, None], other=0.0), known


@triton.jit
def _fold(low, high, k_low, k_high, values, known, top, total, summed):  # prose: allow
    """Fold one more block into a softmax: highest score, sum of shares, weighted values."""
    scores = tl.dot(high, k_high, tl.dot(low, k_low))
    scores = tl.where(known[None, :], scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, axis=1))
    old = tl.exp2(top - highest)
    shares = tl.exp2(scores - highest[:, None])
    summed = tl.dot(shares.to(values.dtype), values, summed * old[:, None])
    return highest, total * old + tl.sum(shares, axis=1), summed


@triton.jit
def _attend(
    parts, keys, values, slots, positions, cos, sin, q_norm, k_norm, out, sums, tops,
    scale, eps, capacity, slot_stride, stride,
    kv_heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, splits: tl.constexpr,
    pieces: tl.constexpr, padded: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = dim // 2
    heads: tl.constexpr = kv_heads * group
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    keys += slot * slot_stride + head * capacity * dim
    values += slot * slot_stride + head * capacity * dim
    each = tl.cdiv(tl.cdiv(position, splits), block) * block  # prose: allow
    begin = split * each
    end = tl.minimum(position, begin + each)
    # Older keys are already in the cache, so their first block is read before the wait.
    k_low, k_high, seen, known = _read(keys, values, begin, end, dim, block)  # prose: allow
    if early:
        gdc_wait()
    lane = tl.arange(0, padded)
    real = lane < group
    parts += row * (heads + 2 * kv_heads) * dim
    cos += position * dim
    sin += position * dim
    mine = head * group + lane
    low, high = _halves(parts, stride, mine, real, q_norm, cos, sin, eps, dim, pieces)
    kind = keys.dtype.element_ty
    low, high = (low * scale).to(kind), (high * scale).to(kind)
    # Lower than any score but finite: -inf - -inf would be NaN in a split without keys.
    top = tl.full((padded,), -1e30, tl.float32)
    total = tl.zeros((padded,), tl.float32)
    summed = tl.zeros((padded, dim), tl.float32)
    at, part = tl.arange(0, dim), tl.arange(0, half)
    if split == 0:
        # Split 0 handles the new token: it writes it to the cache and attends to it in registers.
        one = tl.arange(0, 1)  # prose: allow
        new_low, new_high = _halves(
            parts, stride, heads + head + one, one == 0, k_norm, cos, sin, eps, dim, pieces
        )
        new_low, new_high = new_low.to(kind), new_high.to(kind)
        place = keys + (position + one)[:, None] * dim + part[None, :]
        tl.store(place, new_low)
        tl.store(place + half, new_high)
        place = (heads + kv_heads + head) * dim + at
        value = _sum(parts, stride, place, at < dim, pieces).to(kind)
        tl.store(values + position * dim + at, value)
        top = tl.sum(low.to(tl.float32) * new_low.to(tl.float32), axis=1)
        top += tl.sum(high.to(tl.float32) * new_high.to(tl.float32), axis=1)
        total += 1.0
        summed += value.to(tl.float32)[None, :]
    top, total, summed = _fold(low, high, k_low, k_high, seen, known, top, total, summed)
    for start in range(begin + block, end, block):
        k_low, k_high, seen, known = _read(keys, values, start, end, dim, block)  # prose: allow
        top, total, summed = _fold(low, high, k_low, k_high, seen, known, top, total, summed)
    which = row * heads + mine
    if splits == 1:
        result = (summed / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + which[:, None] * dim + at[None, :], result, mask=real[:, None])
    else:
        which = which * splits + split
        tl.store(sums + which[:, None] * dim + at[None, :], summed, mask=real[:, None])
        tl.store(tops + which * 2, top, mask=real)
        tl.store(tops + which * 2 + 1, total, mask=real)


@triton.jit
def _combine(sums, tops, out, dim: tl.constexpr, splits: tl.constexpr, early: tl.constexpr):
    """Combine the splits of one head of one row, each weighted by its share."""
    if early:
        gdc_launch_dependents()
        gdc_wait()
    which = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    split = which * splits + tl.arange(0, splits)
    at = tl.arange(0, dim)
    top, total = tl.load(tops + split * 2), tl.load(tops + split * 2 + 1)
    share = tl.exp2(top - tl.max(top))
    summed = tl.sum(tl.load(sums + split[:, None] * dim + at[None, :]) * share[:, None], axis=0)
    result = summed / tl.sum(total * share)
    tl.store(out + which * dim + at, result.to(out.dtype.element_ty))
