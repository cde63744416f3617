"""A trainer's forward pass over the engine's weights, with the operations of transformers.

Used only for comparison: whole sequences, separate projections, no cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.model.arithmetic import mix_experts, round_up, route, silu
from lockstep.engine.model.model import Model
from lockstep.engine.numerics.segments import segment_attention
from lockstep.engine.weights.weights import Layer, Weights


def trainer_logits(model: Model, weights: Weights, sequences: list[list[int]]) -> Tensor:
    """Return logits (sequences, padded length, vocabulary), with a graph if grad is enabled."""
    config = model.config
    width = round_up(max(map(len, sequences)), model.row_multiple)
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in sequences])
    positions = torch.arange(width).clamp(max=model.max_len - 1)
    cos, sin = (table[positions] for table in model.rotation)
    x = F.embedding(ids, weights.embed).requires_grad_(torch.is_grad_enabled())
    for layer in weights.layers:
        h = _norm(x, layer.input_norm, config.eps)
        x = x + _attention(model, layer, h, cos, sin)
        x = x + _mlp(model, layer, _norm(x, layer.post_norm, config.eps))
    return F.linear(_norm(x, weights.norm, config.eps), weights.head)


def _attention(model: Model, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    config = model.config
    batch, length, _ = h.shape
    sizes = [config.q_size, config.kv_size, config.kv_size]
    none = (None, None, None)
    biases = none if layer.qkv_bias is None else layer.qkv_bias.split(sizes)
    q, k, v = (
        F.linear(h, weight, bias).view(batch, length, -1, config.head_dim)
        for weight, bias in zip(layer.qkv.split(sizes), biases, strict=True)
    )
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(q, layer.q_norm, config.eps), _norm(k, layer.k_norm, config.eps)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    q, k = (part * cos + _rotate_half(part) * sin for part in (q, k))
    out = segment_attention(q, k, v, None, model.scale).reshape(batch, length, -1)
    return F.linear(out, layer.out)


def _mlp(model: Model, layer: Layer, h: Tensor) -> Tensor:
    config = model.config
    if layer.router is not None:
        rows = h.reshape(-1, h.shape[-1])
        shares, ids = route(
            F.linear(rows, layer.router), config.experts_per_token, config.normalize_top_k
        )
        mixed = mix_experts(rows, ids, shares, layer.gate_up, layer.down, model.row_multiple)
        return mixed.view(h.shape)
    gate, up = layer.gate_up.chunk(2)
    return F.linear(silu(F.linear(h, gate)) * F.linear(h, up), layer.down)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
