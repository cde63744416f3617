"""A Triton kernel for a batch of one row: its norm is part of the product that reads it.

With one row a launch takes longer than what it computes. Every program norms the row for itself,
while the weights that it loaded before are on their way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.engine.cuda.kernels import _sum, early

WIDEST = 4096
"""Numbers of a row up to which a program holds all of it."""
NARROW = 4
"""Outputs that one program computes."""


def fits(x: Tensor) -> bool:
    """Whether the kernel takes x, which is one row and not too wide."""
    return bool(x.shape[0] == 1 and x.shape[1] <= WIDEST)


def norm_linear(
    x: Tensor,
    parts: Tensor | None,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """x with the sum of `parts` added, and RMSNorm of that times weight.T, plus bias, in fp32.

    `gated` takes the first half of the outputs as a gate of the second, and rounds the result.
    """
    width, outer = x.shape[1], weight.shape[0] // (2 if gated else 1)
    kind = x.dtype if gated else torch.float32
    out = torch.empty((1, outer), dtype=kind, device=x.device)
    left = torch.empty_like(x)
    _norm_linear[(triton.cdiv(outer, NARROW),)](
        x, parts, norm, weight, bias, out, left, eps, width=width, outer=outer,
        splits=0 if parts is None else parts.shape[0], gated=gated,
        block=pow2(width), block_n=NARROW, num_warps=4, **early(x.device),
    )  # fmt: skip
    return left, out


def norm_linear_reference(
    x: Tensor,
    parts: Tensor | None,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` in plain torch."""
    total = x.float() if parts is None else x.float() + parts.sum(0)
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * norm.float()
    out = F.linear(normed, weight.float(), None if bias is None else bias.float())
    if gated:
        first, second = out.chunk(2, -1)
        out = (F.silu(first) * second).to(x.dtype)
    return total.to(x.dtype), out


@triton.jit
def _norm_linear(
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
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if splits:
        value += _sum(parts, width, at, inside, splits)
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
