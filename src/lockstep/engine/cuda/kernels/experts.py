"""Triton kernels for a mixture of experts: all experts of a layer in two products.

The host never reads from the device here, so one captured graph serves every routing. Products and
roundings are those of `mix_experts` on the exact kernels, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.engine.cuda.kernels import exact_kernels
from lockstep.engine.cuda.kernels.exact_kernels import _gate_value, _part, launch

FEW, MANY = 16, 64
"""Rows of one expert per program, for small and for large batches."""
COLUMNS, TERMS, TERMS_FP32 = 32, 128, 32
PAIRS = 256
"""Pairs of a row and an expert counted at a time."""


def mix(x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the weighted sum of each row's experts, always added in order of the expert's number.

    `ids` and `shares` are (rows, k), `gate_up` (experts, 2 * width, hidden), `down` (experts,
    hidden, width).
    """
    (rows, top), (experts, both, hidden) = ids.shape, gate_up.shape
    pairs, wide, width = rows * top, pow2(experts), both // 2
    block_m = FEW if pairs <= FEW * experts else MANY
    # Sort the pairs by expert, stable within an expert; `plan` locates each expert's range.
    order = ids.flatten().argsort(stable=True)
    plan = torch.empty((3, wide), dtype=torch.int32, device=x.device)
    options = launch(x)
    _plan[(1,)](ids, plan, pairs, wide=wide, block_m=block_m, chunk=PAIRS, **options)
    # Upper bound for any routing, so that one captured graph fits all: each expert may have one
    # partial block.
    blocks = min(pairs, experts + pairs // block_m)
    steps = TERMS_FP32 if x.dtype == torch.float32 else TERMS
    sizes = {"experts": experts, "wide": wide, "block_m": block_m, "block_n": COLUMNS}
    inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    mixed = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    for source, weight, out, lines, gated in (
        (x, gate_up, inner, top, True),
        (inner, down, mixed, 1, False),
    ):
        terms, outer = source.shape[1], out.shape[1]
        part = min(exact_kernels.PART, max(pow2(terms), 16))
        _grouped[(blocks, triton.cdiv(outer, COLUMNS))](
            source, weight, out, order, plan, inner=terms, outer=outer, lines_of=lines,
            part=part, gated=gated, block_k=min(steps, part if terms <= part else part // 2),
            **sizes, num_warps=4, num_stages=3, **options,
        )  # fmt: skip
    out = torch.empty_like(x)
    _weigh_up[(rows,)](
        mixed, ids, shares, out, hidden, top=top, lanes=pow2(top), block=pow2(hidden), **options
    )
    return out


@triton.jit(do_not_specialize=["pairs"])
def _plan(
    ids, plan, pairs, wide: tl.constexpr, block_m: tl.constexpr, chunk: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Store for each expert the end of its row blocks, its number of rows, and its first row."""
    if early:
        gdc_launch_dependents()
        gdc_wait()
    expert, at = tl.arange(0, wide), tl.arange(0, chunk)
    counts = tl.zeros((wide,), tl.int32)
    for start in range(0, pairs, chunk):
        which = tl.load(ids + start + at, mask=start + at < pairs, other=-1).to(tl.int32)
        counts += tl.sum((which[None, :] == expert[:, None]).to(tl.int32), axis=1)
    tl.store(plan + expert, tl.cumsum((counts + block_m - 1) // block_m, axis=0))
    tl.store(plan + wide + expert, counts)
    tl.store(plan + 2 * wide + expert, tl.cumsum(counts, axis=0) - counts)


@triton.jit
def _grouped(
    x, weight, out, order, plan, inner: tl.constexpr, outer: tl.constexpr,
    lines_of: tl.constexpr, part: tl.constexpr, gated: tl.constexpr, block_k: tl.constexpr,
    experts: tl.constexpr, wide: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Multiply some rows of one expert with some columns of its weights.

    Each row of x serves `lines_of` consecutive pairs.
    """
    if early:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    expert = tl.sum((tl.load(plan + tl.arange(0, wide)) <= block).to(tl.int32))
    if expert < experts:
        count = tl.load(plan + wide + expert)
        before = tl.load(plan + expert) - (count + block_m - 1) // block_m
        m = (block - before) * block_m + tl.arange(0, block_m)
        pair = tl.load(order + tl.load(plan + 2 * wide + expert) + m, mask=m < count, other=0)
        n = tl.program_id(1) * block_n + tl.arange(0, block_n)
        k = tl.arange(0, block_k)
        some, real = (m < count)[:, None], (n < outer)[None, :]
        lines = x + (pair // lines_of)[:, None] * inner + k[None, :]
        columns = weight + n.to(tl.int64)[None, :] * inner + k[:, None]
        columns += expert.to(tl.int64) * (outer * inner * (2 if gated else 1))
        total = _whole(lines, columns, some, real, inner, part, block_m, block_n, block_k)
        total = total.to(out.dtype.element_ty)
        if gated:
            columns += outer * inner
            up = _whole(lines, columns, some, real, inner, part, block_m, block_n, block_k)
            up = up.to(out.dtype.element_ty).to(tl.float32)
            total = _gate_value(total.to(tl.float32), up, out.dtype.element_ty)
        tl.store(out + pair[:, None] * outer + n[None, :], total, mask=some & real)


@triton.jit
def _whole(
    lines, columns, some, real, inner: tl.constexpr, part: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Return a product summed in the order of `exact_kernels.linear`."""
    total = tl.zeros((block_m, block_n), tl.float32)
    total = _part(lines, columns, some, real, 0, part, total, inner, block_k)
    if inner > part:
        for begin in range(part, inner, part):
            summed = tl.zeros((block_m, block_n), tl.float32)
            end = begin + part
            total += _part(lines, columns, some, real, begin, end, summed, inner, block_k)
    return total


@triton.jit
def _weigh_up(
    mixed, ids, shares, out, width,
    top: tl.constexpr, lanes: tl.constexpr, block: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Sum the experts of one row in order of their numbers, rounding each term and each sum."""
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane, at = tl.arange(0, lanes), tl.arange(0, block)
    inside = at < width
    kind = out.dtype.element_ty
    # Padding lanes get a number above all expert numbers, so they sort last.
    chosen = tl.load(ids + row * top + lane, mask=lane < top, other=1 << 30)
    rank = tl.sum((chosen[None, :] < chosen[:, None]).to(tl.int32), axis=1)
    total = tl.zeros((block,), tl.float32)
    for place in tl.static_range(top):
        pair = row * top + tl.sum(tl.where((rank == place) & (lane < top), lane, 0))
        value = tl.load(mixed + pair * width + at, mask=inside, other=0.0).to(tl.float32)
        part = (value * tl.load(shares + pair).to(tl.float32)).to(kind).to(tl.float32)
        total = (total + part).to(kind).to(tl.float32)
    tl.store(out + row * width + at, total.to(kind), mask=inside)
