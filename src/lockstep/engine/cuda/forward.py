"""The layers of a model on a CUDA device. The caller provides the attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda.kernels import close_kernels, exact_kernels, experts, single_row
from lockstep.engine.cuda.kernels.exact_gated import linear_gated
from lockstep.engine.kv.cache import SlotCache
from lockstep.engine.model.arithmetic import route
from lockstep.engine.weights.weights import Layer, Weights

Attend = Callable[[int, Layer, Tensor], Tensor]
"""The attention of one layer: (number, weights, product) -> (rows, heads * dim). The product holds
queries, keys and values; in close arithmetic as parts still to be summed."""


Adapt = Callable[[Tensor, Tensor, int, str], None]
"""Add the updates of adapters to a product in place: (product, inputs, layer, packed module)."""
Record = Callable[[int, Tensor], None]
"""Receives the experts of all rows of each MoE layer: (layer, experts)."""


def forward(
    config: ModelConfig,
    weights: Weights,
    ids: Tensor,
    attend: Attend,
    *,
    exact: bool,
    adapt: Adapt | None = None,
    record: Record | None = None,
) -> Tensor:
    """Return the normed hidden states (rows, hidden); adapters and experts only if `exact`.

    Every product is rounded before an adapter's update is added, as in PEFT's modules.
    """
    x = F.embedding(ids, weights.embed)
    if single_row.fits(x) and adapt is None and not config.moe_layers:
        return _one_row(config.eps, weights, x, attend, exact=exact)
    if exact:
        return _exact_layers(config, weights, x, attend, adapt, record)
    return _close_layers(config.eps, weights, x, attend)


def recorder(config: ModelConfig, cache: SlotCache, slots: Tensor, positions: Tensor) -> Record:
    """Return a function that stores the experts of these rows next to their keys and values."""

    def record(layer: int, experts: Tensor) -> None:
        if cache.experts is not None:
            column = config.moe_layers.index(layer)
            cache.experts[slots, positions, column] = experts.to(cache.experts.dtype)

    return record


def head(hidden: Tensor, weights: Weights, out: Tensor, *, exact: bool) -> None:
    """Write the logits of these rows to `out`, in the model's dtype."""
    if exact:
        exact_kernels.linear(hidden, weights.head, out=out)
    else:
        torch.mm(hidden, weights.head.t(), out=out)


def _close_layers(eps: float, weights: Weights, x: Tensor, attend: Attend) -> Tensor:
    delta: Tensor | None = None
    k = close_kernels
    for i, layer in enumerate(weights.layers):
        h = k.add_norm(x, delta, layer.attention_norm, eps)
        attended = attend(i, layer, k.linear(h, layer.qkv, layer.qkv_bias))
        h = k.add_norm(x, k.linear(attended, layer.out), layer.mlp_norm, eps)
        inner = k.gate(k.linear(h, layer.gate_up), x.dtype)
        delta = k.linear(inner, layer.down)
    return k.add_norm(x, delta, weights.norm, eps)


def _exact_layers(
    config: ModelConfig,
    weights: Weights,
    x: Tensor,
    attend: Attend,
    adapt: Adapt | None,
    record: Record | None,
) -> Tensor:
    k, eps = exact_kernels, config.eps

    def linear(
        x: Tensor, weight: Tensor, i: int, module: str, bias: Tensor | None = None
    ) -> Tensor:
        out = k.linear(x, weight, bias)
        if adapt is not None:
            adapt(out, x, i, module)
        return out

    def parts(x: Tensor, weight: Tensor, i: int, module: str) -> Tensor:
        if adapt is None:
            return k.linear_parts(x, weight)
        return linear(x, weight, i, module).float()[None]

    delta: Tensor | None = None
    for i, layer in enumerate(weights.layers):
        h = k.add_norm(x, delta, layer.attention_norm, eps)
        attended = attend(i, layer, linear(h, layer.qkv, i, "qkv", layer.qkv_bias))
        h = k.add_norm(x, parts(attended, layer.out, i, "out"), layer.mlp_norm, eps)
        if layer.router is not None:
            logits = k.linear(h, layer.router)
            shares, routed = route(logits, config.experts_per_token, config.normalize_top_k)
            if record is not None:
                record(i, routed)
            delta = experts.mix(h, routed, shares, layer.gate_up, layer.down).float()[None]
            continue
        if adapt is None:
            inner = linear_gated(h, layer.gate_up)
        else:
            inner = k.gate(linear(h, layer.gate_up, i, "gate_up"))
        delta = parts(inner, layer.down, i, "down")
    return k.add_norm(x, delta, weights.norm, eps)


def _one_row(eps: float, weights: Weights, x: Tensor, attend: Attend, *, exact: bool) -> Tensor:
    """Return the hidden states of a batch of one row, computed in fewer launches."""
    delta: Tensor | None = None
    parts = exact_kernels.linear_parts if exact else close_kernels.linear
    norm_linear = partial(single_row.norm_linear, eps=eps, exact=exact)
    for i, layer in enumerate(weights.layers):
        x, product = norm_linear(x, delta, layer.attention_norm, layer.qkv, layer.qkv_bias)
        attended = attend(i, layer, product if exact else product[None])
        delta = parts(attended, layer.out)
        x, inner = norm_linear(x, delta, layer.mlp_norm, layer.gate_up, gated=True)
        delta = parts(inner, layer.down)
    add_norm = exact_kernels.add_norm if exact else close_kernels.add_norm
    return add_norm(x, delta, weights.norm, eps)
