"""A trainer's forward pass over the engine's weights, with the operations of transformers.

Used only for comparison: whole sequences, separate projections, no cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.model.arithmetic import gelu_tanh, mix_experts, round_up, route, silu
from lockstep.engine.model.model import Model
from lockstep.engine.numerics.segments import segment_attention
from lockstep.engine.weights.weights import Layer, Weights


def trainer_logits(model: Model, weights: Weights, sequences: list[list[int]]) -> Tensor:
    """Return logits (sequences, padded length, vocabulary), with a graph if grad is enabled."""
    config = model.config
    width = round_up(max(map(len, sequences)), model.row_multiple)
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in sequences])
    positions = torch.arange(width).clamp(max=model.max_len - 1)
    x = F.embedding(ids, weights.embed) * config.traits.embedding_scale
    x = x.requires_grad_(torch.is_grad_enabled())
    bare = config.traits.norms == "outputs"
    for i, layer in enumerate(weights.layers):
        h = x if bare else _norm(model, x, layer.attention_norm)
        out = _attention(model, layer, h, positions, i)
        x = x + _norm_output(model, out, layer.attention_norm, layer.attention_out_norm)
        h = x if bare else _norm(model, x, layer.mlp_norm)
        x = x + _norm_output(model, _mlp(model, layer, h), layer.mlp_norm, layer.mlp_out_norm)
    return F.linear(_norm(model, x, weights.norm), weights.head)


def _attention(model: Model, layer: Layer, h: Tensor, positions: Tensor, i: int) -> Tensor:
    config, traits = model.config, model.config.traits
    batch, length, _ = h.shape
    sizes = [config.q_size, config.kv_size, config.kv_size]
    none = (None, None, None)
    biases = none if layer.qkv_bias is None else layer.qkv_bias.split(sizes)
    q, k, v = (
        F.linear(h, weight, bias)
        for weight, bias in zip(layer.qkv.split(sizes), biases, strict=True)
    )
    shape = batch, length, -1, config.head_dim
    if traits.qk_norm == "head":
        q, k = q.view(shape), k.view(shape)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _norm(model, q, layer.q_norm), _norm(model, k, layer.k_norm)
    q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
    windowed = i in traits.windowed
    if i not in traits.unrotated:
        tables = model.window_rotation if windowed else model.rotation
        cos, sin = (table[positions] for table in tables)
        q, k = (_rotate(part, cos, sin) for part in (q, k))
    window = traits.window if windowed else 0
    out = segment_attention(q, k, v, None, model.scale, window).reshape(batch, length, -1)
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
    activation = silu if config.traits.activation == "silu" else gelu_tanh
    return F.linear(activation(F.linear(h, gate)) * F.linear(h, up), layer.down)


def _norm(model: Model, x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True)
    normed = (wide * torch.rsqrt(variance + model.config.eps)).to(x.dtype)
    offset = model.config.traits.norm_offset
    return (weight + offset if offset else weight) * normed


def _norm_output(model: Model, x: Tensor, only: Tensor, own: Tensor | None) -> Tensor:
    if model.config.traits.norms == "outputs":
        return _norm(model, x, only)
    return x if own is None else _norm(model, x, own)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    return torch.cat((turned * cos + _rotate_half(turned) * sin, rest), -1)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
