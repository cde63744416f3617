"""Triton kernels for prefill: tokens of many sequences in one batch, each over its own slot.

Each kernel has a reference in plain torch next to it, and tests compare the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.engine.cuda.kernels.close_kernels import LOG2_E, _halves, _sum, early

ROWS = 128
"""Queries per attention program, counted over all heads that share their keys."""
KEYS = 64
"""Keys that an attention program reads per iteration."""


def store_heads(
    parts: Tensor,
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
    """Return queries (rows, heads * dim), normed, rotated and scaled for a softmax of base 2.

    Keys and values of row r are written to position positions[r] of slot slots[r]; nothing is
    stored for a row whose slot is negative. `parts` and the cache are as in `close_kernels.attend`.
    """
    pieces, rows, width = parts.shape
    _, kv_heads, capacity, dim = keys.shape
    heads = width // dim - 2 * kv_heads
    out = torch.empty((rows, heads * dim), dtype=keys.dtype, device=keys.device)
    _store_heads[(rows,)](
        parts, out, keys, values, slots, positions, cos, sin, q_norm, k_norm,
        scale * LOG2_E, eps, capacity, keys.stride(0), rows * width,
        heads=heads, kv_heads=kv_heads, dim=dim, pieces=pieces,
        q_rows=pow2(heads), k_rows=pow2(kv_heads), num_warps=4, **early(keys.device),
    )  # fmt: skip
    return out


@triton.jit
def _store_heads(
    parts, out, keys, values, slots, positions, cos, sin, q_norm, k_norm,
    scale, eps, capacity, slot_stride, stride,
    heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, pieces: tl.constexpr,
    q_rows: tl.constexpr, k_rows: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = dim // 2
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    parts += row * (heads + 2 * kv_heads) * dim
    cos += position * dim
    sin += position * dim
    kind = keys.dtype.element_ty
    part, at = tl.arange(0, half), tl.arange(0, dim)
    lane = tl.arange(0, q_rows)
    real = lane < heads
    low, high = _halves(parts, stride, lane, real, q_norm, cos, sin, eps, dim, pieces)
    place = out + row * heads * dim + lane[:, None] * dim + part[None, :]
    tl.store(place, (low * scale).to(kind), mask=real[:, None])
    tl.store(place + half, (high * scale).to(kind), mask=real[:, None])
    lane = tl.arange(0, k_rows)
    real = lane < kv_heads
    low, high = _halves(parts, stride, heads + lane, real, k_norm, cos, sin, eps, dim, pieces)
    kept = (tl.where(slot >= 0, lane, kv_heads) < kv_heads)[:, None]  # prose: allow
    first = slot * slot_stride + lane * capacity * dim + position * dim
    place = keys + first[:, None] + part[None, :]
    tl.store(place, low.to(kind), mask=kept)
    tl.store(place + half, high.to(kind), mask=kept)
    source = (heads + kv_heads + lane)[:, None] * dim + at[None, :]
    value = _sum(parts, stride, source, real[:, None], pieces)
    tl.store(values + first[:, None] + at[None, :], value.to(kind), mask=kept)


def tokens_per_block(group: int) -> int:
    """Return the most tokens of a block of `attend_ragged`, at `group` heads per key."""
    return max(ROWS // group, 1)


def attend_ragged(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor) -> Tensor:
    """Return the causal attention (rows, heads * dim) of queries from `store_heads`.

    Each row of `blocks`, (n, 4), describes consecutive tokens of one sequence: their first row in
    q, their number (at most `tokens_per_block`; 0 for an unused block), their slot, and the
    position of the first.
    """
    _, kv_heads, capacity, dim = keys.shape
    group = q.shape[1] // dim // kv_heads
    out = torch.empty_like(q)
    _attend_ragged[(blocks.shape[0], kv_heads)](
        q, keys, values, blocks, out, capacity, keys.stride(0),
        kv_heads=kv_heads, group=group, dim=dim, rows=max(ROWS, pow2(group)), block=KEYS,
        num_warps=8, num_stages=3, **early(keys.device),
    )  # fmt: skip
    return out


@triton.jit
def _attend_ragged(
    q, keys, values, blocks, out, capacity, slot_stride,
    kv_heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    if early:
        gdc_launch_dependents()
        gdc_wait()
    which, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(blocks + which * 4)
    count = tl.load(blocks + which * 4 + 1)
    slot = tl.load(blocks + which * 4 + 2).to(tl.int64)
    start = tl.load(blocks + which * 4 + 3)
    lane, at, step = tl.arange(0, rows), tl.arange(0, dim), tl.arange(0, block)
    token = lane // group
    real = (token < count)[:, None]
    place = ((first + token) * kv_heads + head) * group + lane % group
    place = place[:, None] * dim + at[None, :]
    query = tl.load(q + place, mask=real, other=0.0)
    keys += slot * slot_stride + head * capacity * dim
    values += slot * slot_stride + head * capacity * dim
    # Lower than any score but finite: -inf - -inf would be NaN in padding rows.
    top = tl.full((rows,), -1e30, tl.float32)
    total = tl.zeros((rows,), tl.float32)
    summed = tl.zeros((rows, dim), tl.float32)
    # Every query sees all keys before the first query, so these blocks need no mask.
    safe = start // block * block
    for begin in range(0, safe, block):
        where = begin + step
        key = tl.load(keys + where[None, :] * dim + at[:, None])
        value = tl.load(values + where[:, None] * dim + at[None, :])
        top, total, summed = _fold_rows(tl.dot(query, key), value, top, total, summed)
    end = start + count
    for begin in range(safe, end, block):
        where = begin + step
        key = tl.load(
            keys + where[None, :] * dim + at[:, None], mask=where[None, :] < end, other=0.0
        )
        value = tl.load(
            values + where[:, None] * dim + at[None, :], mask=where[:, None] < end, other=0.0
        )
        seen = where[None, :] <= start + token[:, None]
        scores = tl.where(seen, tl.dot(query, key), float("-inf"))
        top, total, summed = _fold_rows(scores, value, top, total, summed)
    tl.store(out + place, (summed / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit
def _fold_rows(scores, value, top, total, summed):
    """Fold one more block into a softmax: highest score, sum of shares, weighted values."""
    highest = tl.maximum(top, tl.max(scores, axis=1))
    old = tl.exp2(top - highest)
    shares = tl.exp2(scores - highest[:, None])
    summed = tl.dot(shares.to(value.dtype), value, summed * old[:, None])
    return highest, total * old + tl.sum(shares, axis=1), summed
