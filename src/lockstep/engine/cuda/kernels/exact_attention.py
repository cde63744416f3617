"""Triton kernels for attention whose bits do not depend on the batch. See `exact_kernels`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.engine.cuda.kernels.close_kernels import LOG2_E
from lockstep.engine.cuda.kernels.exact_kernels import _turned, launch

KEYS = 64
"""Keys per block of a softmax."""
SPLIT = 128
"""Keys per split. Blocks within a split are folded; splits are joined in order.

Splits are counted from the start of the sequence, so the bits of a query depend only on its
position, not on the length of the sequence or on the way the batch is cut."""
QUERIES = 128
"""Queries per block of a prefill, counted over all heads that share their keys."""
KEYS_FP32, QUERIES_FP32 = 32, 64
"""Upper limits for one fp32 program, which holds all terms of a product in registers. Several
programs compute a block of queries."""


@triton.jit
def _split(
    low, high, keys, values, begin, end, last, scale,
    dim: tl.constexpr, block: tl.constexpr, size: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Return the softmax over one split of keys: highest score, sum of shares, weighted values.

    `low` and `high` are the halves of the queries. Joined in registers, they would be multiplied in
    another order than when loaded as a whole. `end` is one past the last existing key, `last`
    (rows, 1) the last key that each query sees.
    """
    half: tl.constexpr = dim // 2
    at, part, step = tl.arange(0, dim), tl.arange(0, half), tl.arange(0, block)
    # Lower than any score but finite: -inf - -inf would be NaN in a block that a query cannot see.
    top = tl.full((rows,), -1e30, tl.float32)
    total = tl.zeros((rows, 16), tl.float32)
    summed = tl.zeros((rows, dim), tl.float32)
    # Sum by the matrix units: their order does not depend on the layout of a tile in registers.
    first = (tl.arange(0, 16)[None, :] + step[:, None] * 0) == 0
    ones = tl.where(first, 1.0, 0.0).to(low.dtype)
    for start in range(begin, tl.minimum(begin + size, end), block):
        where = start + step
        there = where < end
        key = keys + where[None, :] * dim + part[:, None]
        key_low = tl.load(key, mask=there[None, :], other=0.0)
        key_high = tl.load(key + half, mask=there[None, :], other=0.0)
        value = tl.load(values + where[:, None] * dim + at[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(low, key_low, input_precision="ieee")
        scores = tl.dot(high, key_high, scores, input_precision="ieee") * scale
        scores = tl.where(where[None, :] <= last, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        old = tl.exp2(top - highest)[:, None]
        shares = tl.exp2(scores - highest[:, None]).to(value.dtype)
        total = tl.dot(shares, ones, total * old, input_precision="ieee")
        summed = tl.dot(shares, value, summed * old, input_precision="ieee")
        top = highest
    return top, tl.sum(total, axis=1), summed


@triton.jit
def _joined(top, total, summed, more_top, more_total, more_summed):
    """Return two parts of a softmax joined into one."""
    highest = tl.maximum(top, more_top)
    old, new = tl.exp2(top - highest), tl.exp2(more_top - highest)
    total = total * old + more_total * new
    return highest, total, summed * old[:, None] + more_summed * new[:, None]


def attend_ragged(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, scale: float) -> Tensor:
    """Return the causal attention of a ragged batch, as in `prefill_kernels.attend_ragged`."""
    _, kv_heads, capacity, dim = keys.shape
    group = q.shape[1] // dim // kv_heads
    out = torch.empty_like(q)
    lanes = rows = max(QUERIES, pow2(group))
    if q.dtype == torch.float32:
        rows = min(lanes, QUERIES_FP32 * 128 // max(dim, 128))
    _attend_ragged[(blocks.shape[0], kv_heads, lanes // rows)](
        q, keys, values, blocks, out, capacity, keys.stride(0), scale * LOG2_E,
        kv_heads=kv_heads, group=group, dim=dim, rows=rows,
        block=_keys(q.dtype), size=SPLIT, num_warps=8, num_stages=2, **launch(keys),
    )  # fmt: skip
    return out


@triton.jit
def _attend_ragged(
    q, keys, values, blocks, out, capacity, slot_stride, scale,
    kv_heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, size: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
        gdc_wait()
    which, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(blocks + which * 4)
    count = tl.load(blocks + which * 4 + 1)
    slot = tl.load(blocks + which * 4 + 2).to(tl.int64)
    start = tl.load(blocks + which * 4 + 3)
    before = tl.program_id(2) * rows
    lane, at, half = before + tl.arange(0, rows), tl.arange(0, dim), tl.arange(0, dim // 2)
    token = lane // group
    real = (token < count)[:, None]
    place = ((first + token) * kv_heads + head) * group + lane % group
    place = place.to(tl.int64)[:, None] * dim
    low = tl.load(q + place + half[None, :], mask=real, other=0.0)
    high = tl.load(q + place + dim // 2 + half[None, :], mask=real, other=0.0)
    keys += slot * slot_stride + head * capacity * dim
    values += slot * slot_stride + head * capacity * dim
    last = (start + token)[:, None]
    top = tl.full((rows,), -1e30, tl.float32)
    total = tl.zeros((rows,), tl.float32)
    summed = tl.zeros((rows, dim), tl.float32)
    # One past the last key that any of these queries sees.
    end = start + tl.minimum(count, (before + rows - 1) // group + 1)
    end = tl.where(before // group < count, end, 0)
    for begin in range(0, end, size):
        more_top, more_total, more_summed = _split(
            low, high, keys, values, begin, end, last, scale, dim, block, size, rows
        )
        top, total, summed = _joined(top, total, summed, more_top, more_total, more_summed)
    result = (summed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + place + at[None, :], result, mask=real)


def _keys(kind: torch.dtype) -> int:
    """Return the keys per softmax block, the same for all kernels that compute in this dtype."""
    return min(KEYS, KEYS_FP32) if kind == torch.float32 else KEYS


def attend_tokens(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    *,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Return the attention of one new token per row, and write its key and value to its slot.

    Row r reads slot slots[r] up to and including position positions[r]. The key and value are those
    that `exact_kernels.store_heads` writes.
    """
    rows, width = qkv.shape
    _, kv_heads, capacity, dim = keys.shape
    heads = width // dim - 2 * kv_heads
    splits = triton.cdiv(capacity, SPLIT)
    out = torch.empty((rows, heads * dim), dtype=keys.dtype, device=keys.device)
    sums = out.new_empty((rows, heads, splits, dim), dtype=torch.float32)
    tops = out.new_empty((rows, heads, splits, 2), dtype=torch.float32)
    options, padded = launch(keys), pow2(heads // kv_heads)
    warps = 2 if padded <= 4 else 4
    if keys.dtype != torch.float32:
        padded, warps = max(padded, 16), 4  # matrix instructions need 16 rows
    _attend_tokens[(splits, kv_heads, rows)](
        qkv, keys, values, slots, positions, cos, sin, q_norm, k_norm, sums, tops,
        eps, capacity, keys.stride(0), scale * LOG2_E,
        kv_heads=kv_heads, group=heads // kv_heads, dim=dim, splits=splits,
        padded=padded, block=_keys(keys.dtype), size=SPLIT,
        num_warps=warps, num_stages=2, **options,
    )  # fmt: skip
    _join_tokens[(heads, rows)](
        sums, tops, positions, out, dim=dim, splits=splits, size=SPLIT, num_warps=1, **options
    )
    return out


@triton.jit
def _attend_tokens(
    qkv, keys, values, slots, positions, cos, sin, q_norm, k_norm, sums, tops,
    eps, capacity, slot_stride, scale,
    kv_heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, splits: tl.constexpr,
    padded: tl.constexpr, block: tl.constexpr, size: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
        gdc_wait()
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    begin = split * size
    heads: tl.constexpr = kv_heads * group
    half: tl.constexpr = dim // 2
    if begin <= position:
        slot = tl.load(slots + row).to(tl.int64)
        keys += slot * slot_stride + head * capacity * dim
        values += slot * slot_stride + head * capacity * dim
        qkv += row.to(tl.int64) * (heads + 2 * kv_heads) * dim
        cos += position * dim
        sin += position * dim
        lane, at = tl.arange(0, padded), tl.arange(0, dim)
        real = lane < group
        if position < begin + size:
            # The new token belongs to this split, so no other program reads what is written here.
            one, part = tl.arange(0, 1), tl.arange(0, half)  # prose: allow
            new = heads + head + one
            new_low, new_high = _turned(qkv, cos, sin, k_norm, new, one == 0, eps, dim)
            place = keys + (position + one)[:, None] * dim + part[None, :]
            tl.store(place, new_low)
            tl.store(place + half, new_high)
            value = tl.load(qkv + (heads + kv_heads + head) * dim + at)
            tl.store(values + position * dim + at, value)
            tl.debug_barrier()
        low, high = _turned(qkv, cos, sin, q_norm, head * group + lane, real, eps, dim)
        last = (position + lane * 0)[:, None]
        top, total, summed = _split(
            low, high, keys, values, begin, position + 1, last, scale, dim, block, size, padded
        )
        which = (row * heads + head * group + lane) * splits + split
        tl.store(sums + which[:, None] * dim + at[None, :], summed, mask=real[:, None])
        tl.store(tops + which * 2, top, mask=real)
        tl.store(tops + which * 2 + 1, total, mask=real)


@triton.jit
def _join_tokens(
    sums, tops, positions, out,
    dim: tl.constexpr, splits: tl.constexpr, size: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Join the splits of one head of one row, in order."""
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    which = row * tl.num_programs(0) + tl.program_id(0)
    at, one = tl.arange(0, dim), tl.arange(0, 1)  # prose: allow
    top = tl.full((1,), -1e30, tl.float32)
    total = tl.zeros((1,), tl.float32)
    summed = tl.zeros((1, dim), tl.float32)
    for split in range(tl.load(positions + row) // size + 1):
        place = which * splits + split + one
        more_summed = tl.load(sums + place[:, None] * dim + at[None, :])
        more_top, more_total = tl.load(tops + place * 2), tl.load(tops + place * 2 + 1)
        top, total, summed = _joined(top, total, summed, more_top, more_total, more_summed)
    result = (summed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (which + one)[:, None] * dim + at[None, :], result)
