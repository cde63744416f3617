"""Arithmetic of the forward pass: `exact`, which does not depend on the batch, and `close`.

Exact arithmetic rests on two properties of matrix products on CPUs. A row of a product does not
depend on the number of rows, if that is a certain multiple. A sum over keys does not depend on how
many are hidden, for certain numbers of keys. `lockstep.engine.numerics.block_shapes` finds both on
this machine and `lockstep.engine.numerics.selftest` proves them; this module does not check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.numerics.block_shapes import LANES, attention_shapes
from lockstep.tokens.numerics import ArithmeticName

CLOSE_ROW_MULTIPLE = 8
"""Row multiple of a batch in close mode: it gives few shapes, none of them slow."""
STRETCH = 64
"""Queries of a prefill computed per call, over no more keys than they need."""
SHARED_FROM = 32768
"""Number of values from which torch splits an elementwise loop over threads."""
HIDDEN = float("-inf")


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


class Arithmetic(Protocol):
    """The computation of attention over slots of keys and values.

    Keys that a query must not see are hidden by a bias of -inf on their scores.
    """

    name: ArithmeticName

    def keys(self, count: int) -> int:
        """Return how many keys decoding reads when `count` are needed.

        Never more than `keys` of the longest context, which is the capacity of a slot.
        """
        ...

    def decode(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        """Return the attention (R, heads * d) of one query per sequence.

        q is (R, heads, d), k and v are (R, kv_heads, T, d), bias is (R, T).
        """
        ...

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int = 0
    ) -> Tensor:
        """Return the attention (n, heads * d) of causal queries from position `start` on.

        q is (n, heads, d); k and v are a whole slot, (kv_heads, capacity, d). With a `window`, a
        query sees only so many keys, its own included.
        """
        ...


class Exact:
    """Attention padded to the shapes that keep the bits on this machine."""

    def __init__(self, dim: int, max_len: int, name: ArithmeticName = "exact") -> None:
        self.name = name
        self._shapes = attention_shapes(dim)
        self._longest = max_len
        # Row r hides all keys after `max_len` + r. A window that starts `shift` later hides the
        # keys after `max_len` + r - `shift`, so one matrix serves every position.
        self._bias = torch.full((STRETCH, 2 * self.keys(max_len)), HIDDEN).triu_(max_len + 1)

    def keys(self, count: int) -> int:
        return self._shapes.keys(count)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        rows, kv_heads, keys, dim = k.shape
        group = q.shape[1] // kv_heads
        queries = q.view(rows, kv_heads, group, dim)
        if padding := -group % self._shapes.queries:
            queries = torch.constant_pad_nd(queries, (0, 0, 0, padding))
        out = exact_attention(queries, k, v, bias.view(rows, 1, 1, keys), scale)
        return out[:, :, :group].reshape(rows, -1)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int = 0
    ) -> Tensor:
        kv_heads, _, dim = k.shape
        count, heads, _ = q.shape
        shape = kv_heads, heads // kv_heads, -1, dim
        out = q.new_empty(count, *shape[:2], dim)
        for at in range(0, count, STRETCH):
            rows = min(STRETCH, count - at)
            queries = q[at : at + rows].view(rows, *shape[:2], dim).permute(1, 2, 0, 3)
            if padding := -rows % self._shapes.prefill:
                queries = torch.constant_pad_nd(queries, (0, 0, 0, padding))
            keys, shift = self.keys(start + at + rows), self._longest - start - at
            bias = self._bias[: rows + padding, shift : shift + keys]
            if window:
                positions = torch.arange(start + at, start + at + rows + padding)
                bias = bias.masked_fill(before_window(positions, keys, window), HIDDEN)
            attended = exact_attention(
                queries,
                k[:, None, :keys].expand(shape),
                v[:, None, :keys].expand(shape),
                bias,
                scale,
            )
            out[at : at + rows] = attended[:, :, :rows].permute(2, 0, 1, 3)
        return out.view(count, heads * dim)


class Close:
    """Attention in the fastest shapes. Its bits may depend on the batch."""

    name: ArithmeticName = "close"

    def keys(self, count: int) -> int:
        return round_up(count, STRETCH)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        rows, kv_heads, keys, dim = k.shape
        queries = q.view(rows, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=bias.view(rows, 1, 1, keys), scale=scale
        )
        return out.reshape(rows, -1)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int = 0
    ) -> Tensor:
        count, heads, dim = q.shape
        keys = start + count
        slides = 0 < window < keys
        mask = None
        if start or slides:
            mask = ~causal_mask(count, keys, start, q.device)
        if mask is not None and slides:
            positions = torch.arange(start, keys, device=q.device)
            mask &= ~before_window(positions, keys, window)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None, :, :keys], v[None, :, :keys],
            attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True,
        )  # fmt: skip
        return out[0].transpose(0, 1).reshape(count, heads * dim)


class ExactOnDevice(Close):
    """Exact arithmetic by the kernels in `lockstep.engine.cuda`. These methods compute as Close."""

    name: ArithmeticName = "exact"


def exact_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return the attention of q (A, B, M, d) over k and v (A, B, T, d).

    M and T must be from `attention_shapes`. Decoding, prefill and the trainer all call this
    function, which makes their bits equal.
    """
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def causal_mask(rows: int, keys: int, start: int, device: torch.device) -> Tensor:
    """Return a mask (rows, keys), true for keys after the query at position `start` + row."""
    positions = torch.arange(start, start + rows, device=device)
    return torch.arange(keys, device=device)[None, :] > positions[:, None]


def before_window(positions: Tensor, keys: int, window: int) -> Tensor:
    """Return a mask (..., keys), true for keys that a query at each position no longer sees."""
    return torch.arange(keys, device=positions.device) <= (positions - window)[..., None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x in transformers' order of operations. Fused kernels use another."""
    wide = x.float()
    # The roundings of `pow(2).mean(-1) + eps`, in fewer operations.
    squares = torch.mul(wide, wide).sum(-1, keepdim=True)
    width = _constant(x.shape[-1], x.device)
    mean = torch.addcdiv(_constant(eps, x.device), squares, width)
    normed = wide * mean.rsqrt_()
    return (normed if wide is x else normed.to(x.dtype)).mul_(weight)


@lru_cache
def _constant(value: float, device: torch.device) -> Tensor:
    """Return a number as a cached tensor. Creating one takes as long as a small operation."""
    return torch.tensor([value], dtype=torch.float32, device=device)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of rows that hold the two side by side."""
    return gated(gate_up, silu)


def gated(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return activation(gate) * up of rows that hold the two side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.shape[-1] % LANES:
        # A vectorised loop ends in scalar code, whose exp has other bits. Make it run over whole
        # rows, as for a trainer, whose gate is a separate contiguous tensor.
        gate = gate.contiguous()
    return activation(gate).mul_(up)


def silu(x: Tensor) -> Tensor:
    """Return the SiLU of x, with bits that do not depend on the number of threads."""
    return in_safe_pieces(F.silu, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU, with bits that do not depend on the threads."""
    return in_safe_pieces(partial(F.gelu, approximate="tanh"), x)


def in_safe_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return an elementwise function of x (..., width), with the bits it has in one thread.

    Torch splits long loops over threads by element count, not by register. A share that does not
    end with a whole register ends in scalar code, whose exponential or cosine has other bits. In
    that case the rows are computed in pieces that are too short to be split.
    """
    count = x.numel()
    shares = min(torch.get_num_threads(), -(-count // SHARED_FROM))
    if shares <= 1 or -(-count // shares) % LANES == 0:
        return function(x)
    rows = x.reshape(-1, x.shape[-1])
    whole = LANES // math.gcd(LANES, x.shape[-1])
    size = max(SHARED_FROM // x.shape[-1] // whole, 1) * whole
    return torch.cat([function(piece) for piece in rows.split(size)]).view(x.shape)


def route(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return weights and ids, both (rows, k), of each row's `k` experts by router logits."""
    probs = torch.softmax(logits, dim=-1, dtype=torch.float)
    weights, ids = torch.topk(probs, k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), ids


def mix_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    multiple: int = 1,
    *,
    product: Callable[[Tensor, Tensor], Tensor] = F.linear,
    gate: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Return the weighted sum of each row's experts, always added in order of the expert's number.

    The rows of each expert are padded to a multiple of `multiple`. `product` and `gate` replace
    `F.linear` and `swiglu` on devices where those do not keep their bits.
    """
    out = torch.zeros_like(x)
    # Sort all rows by expert, with one device sync. The sort is stable and the loop ascends, so
    # a row adds its experts in a fixed order whatever other rows are in the batch.
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=gate_up.shape[0]).tolist()
    experts = zip(order.split(counts), gate_up.unbind(), down.unbind(), strict=True)
    for routed, widen, narrow in experts:
        count = len(routed)
        if not count:
            continue
        rows = routed // ids.shape[1]
        lines = F.pad(x[rows], (0, 0, 0, round_up(count, multiple) - count))
        mixed = product(gate(product(lines, widen)), narrow)[:count]
        out = out.index_add(0, rows, mixed * weights.flatten()[routed, None])
    return out
