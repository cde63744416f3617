"""Two ways to compute one thing: `exact`, whose results do not depend on the batch, and `close`.

Exact rests on how matrix products behave on CPUs: a row of a product does not depend on how many
rows there are as long as that is a multiple of 8, and a sum over keys does not depend on how many
keys are masked when it is made in fixed chunks of 64. `lockstep.engine.selftest` checks both on the
machine at hand; nothing here promises them.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 8
"""Rows of every matrix product come in multiples of this."""
KEYS = 64
"""Keys come in multiples of this, and are summed in chunks of it."""
LANES = 32
"""Elementwise loops take at most this many values at once: two AVX-512 registers."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Arithmetic(Protocol):
    """How attention is computed. Keys and values come padded to a multiple of KEYS."""

    name: str

    def decode(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """One query per sequence: q (R, heads, d), k and v (R, kv_heads, T, d), mask (R, T) true
        where hidden. Returns (R, heads * d)."""
        ...

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
        """Causal queries of one sequence from position `start`: q (n, heads, d), k and v
        (kv_heads, T, d). Returns (n, heads * d)."""
        ...


class Exact:
    name = "exact"

    def decode(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        rows, kv_heads, keys, dim = k.shape
        group = q.shape[1] // kv_heads
        padded = round_up(group, ROWS)
        queries = F.pad(q.view(rows * kv_heads, group, dim), (0, 0, 0, padded - group))
        out = exact_attention(
            queries,
            k.reshape(rows * kv_heads, keys, dim),
            v.reshape(rows * kv_heads, keys, dim),
            mask.view(rows, 1, 1, keys),
            (rows, kv_heads, group, keys),
            scale,
        )
        return out[:, :group].reshape(rows, -1)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
        kv_heads, keys, dim = k.shape
        count, heads, _ = q.shape
        group, padded = heads // kv_heads, round_up(count, ROWS)
        queries = F.pad(q.view(count, kv_heads, group, dim).permute(1, 2, 0, 3),
                        (0, 0, 0, padded - count))  # fmt: skip
        out = exact_attention(
            queries.reshape(kv_heads, group * padded, dim),
            k,
            v,
            causal_mask(padded, keys, start, q.device),
            (kv_heads, group, padded, keys),
            scale,
        )
        out = out.view(kv_heads, group, padded, dim)[:, :, :count]
        return out.permute(2, 0, 1, 3).reshape(count, heads * dim)


class Close:
    name = "close"

    def decode(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        rows, kv_heads, keys, dim = k.shape
        queries = q.view(rows, kv_heads, -1, dim)
        out = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=~mask.view(rows, 1, 1, keys), scale=scale
        )
        return out.reshape(rows, -1)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
        count, heads, dim = q.shape
        keys = start + count
        mask = None if start == 0 else ~causal_mask(count, keys, start, q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[None, :, :keys], v[None, :, :keys],
            attn_mask=mask, is_causal=start == 0, scale=scale, enable_gqa=True,
        )  # fmt: skip
        return out[0].transpose(0, 1).reshape(count, heads * dim)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, shape: tuple[int, ...], scale: float
) -> Tensor:
    """Attention of q (N, M, d) over k and v (N, T, d), with M and T padded as this module asks.

    `mask` is true where a key is hidden and broadcasts against the scores viewed as `shape`, which
    may leave out the last of the M rows: what is not a product is not computed for them.
    The same function serves decoding, prefill and the trainer: that is what makes them equal.
    """
    count, padded, keys = len(q), q.shape[1], k.shape[1]
    real = math.prod(shape) // (count * keys)
    scores = torch.bmm(q, k.transpose(1, 2))[:, :real] * scale
    scores.view(shape).masked_fill_(mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if real < padded:
        weights = F.pad(weights, (0, 0, 0, padded - real))
    out = torch.bmm(weights[:, :, :KEYS], v[:, :KEYS])
    for at in range(KEYS, keys, KEYS):
        out = torch.baddbmm(out, weights[:, :, at : at + KEYS], v[:, at : at + KEYS])
    return out


def causal_mask(rows: int, keys: int, start: int, device: torch.device) -> Tensor:
    """(rows, keys), true where the key lies after the query at position `start` + row."""
    positions = torch.arange(start, start + rows, device=device)
    return torch.arange(keys, device=device)[None, :] > positions[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in the order of operations that transformers uses, which a fused kernel is not."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.shape[-1] % LANES:
        # A vector loop ends in scalars, whose exp has other bits: let it run over whole rows, as it
        # does for a trainer, whose gate is a tensor of its own.
        gate = gate.contiguous()
    return F.silu(gate) * up


def route(x: Tensor, router: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights and ids of the `k` experts of each row, both (rows, k)."""
    probs = torch.softmax(F.linear(x, router), dim=-1, dtype=torch.float)
    weights, ids = torch.topk(probs, k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(x.dtype), ids


def mix_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of each row's experts, always added in order of the expert's number."""
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        rows, choice = torch.where(ids == expert)
        if not len(rows):
            continue
        chosen = F.pad(x[rows], (0, 0, 0, round_up(len(rows), ROWS) - len(rows)))
        done = F.linear(gated(F.linear(chosen, gate_up[expert])), down[expert])[: len(rows)]
        out = out.index_add(0, rows, done * weights[rows, choice, None])
    return out
