"""The layers of a model on a CUDA device; attention is left to whoever runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda import exact_kernels, kernels, single_row
from lockstep.engine.model.arithmetic import mix_experts, route
from lockstep.engine.model.lora import AdapterRows
from lockstep.engine.weights.weights import Layer, Weights

Attend = Callable[[int, Layer, Tensor], Tensor]
"""The attention of one layer: its number, its weights, and the product that holds queries, keys and
values (in close arithmetic as parts that are to be added up). Returns (rows, heads * dim)."""


def forward(
    config: ModelConfig, weights: Weights, ids: Tensor, attend: Attend, *, exact: bool
) -> Tensor:
    """Normed hidden states of all rows, (rows, hidden)."""
    x = F.embedding(ids, weights.embed)
    if single_row.fits(x):
        return _one_row(config.eps, weights, x, attend, exact=exact)
    run = _exact_layers if exact else _close_layers
    return run(config.eps, weights, x, attend)


def forward_with(
    config: ModelConfig,
    weights: Weights,
    ids: Tensor,
    attend: Attend,
    *,
    adapters: Sequence[AdapterRows],
    record: Callable[[int, Tensor], None],
) -> Tensor:
    """`forward` in exact arithmetic, under adapters and with experts: not to be captured.

    `record` gets the experts of all rows of each layer that has any. Every product is rounded
    before the adapter's part is added, as PEFT's modules do it.
    """
    k = exact_kernels

    def linear(
        x: Tensor, weight: Tensor, i: int, module: str, bias: Tensor | None = None
    ) -> Tensor:
        out = k.linear(x, weight, bias)
        for rows in adapters:
            rows.add_to(out, x, i, module, k.linear)
        return out

    x = F.embedding(ids, weights.embed)
    delta: Tensor | None = None
    for i, layer in enumerate(weights.layers):
        h = k.add_norm(x, delta, layer.input_norm, config.eps)
        attended = attend(i, layer, linear(h, layer.qkv, i, "qkv", layer.qkv_bias))
        out = linear(attended, layer.out, i, "out")
        h = k.add_norm(x, out.float()[None], layer.post_norm, config.eps)
        if layer.router is None:
            inner = k.gate(linear(h, layer.gate_up, i, "gate_up"))
            delta = linear(inner, layer.down, i, "down").float()[None]
            continue
        logits = k.linear(h, layer.router)
        shares, chosen = route(logits, config.experts_per_token, config.normalize_top_k)
        record(i, chosen)
        mixed = mix_experts(
            h, chosen, shares, layer.gate_up, layer.down, product=k.linear, gate=k.gate
        )
        delta = mixed.float()[None]
    return k.add_norm(x, delta, weights.norm, config.eps)


def head(hidden: Tensor, weights: Weights, out: Tensor, *, exact: bool) -> None:
    """Logits of these rows, in the type of the model."""
    if exact:
        exact_kernels.linear(hidden, weights.head, out=out)
    else:
        torch.mm(hidden, weights.head.t(), out=out)


def _close_layers(eps: float, weights: Weights, x: Tensor, attend: Attend) -> Tensor:
    delta: Tensor | None = None
    k = kernels
    for i, layer in enumerate(weights.layers):
        h = k.add_norm(x, delta, layer.input_norm, eps)
        attended = attend(i, layer, k.linear(h, layer.qkv, layer.qkv_bias))
        h = k.add_norm(x, k.linear(attended, layer.out), layer.post_norm, eps)
        inner = k.gate(k.linear(h, layer.gate_up), x.dtype)
        delta = k.linear(inner, layer.down)
    return k.add_norm(x, delta, weights.norm, eps)


def _exact_layers(eps: float, weights: Weights, x: Tensor, attend: Attend) -> Tensor:
    delta: Tensor | None = None
    k = exact_kernels
    for i, layer in enumerate(weights.layers):
        h = k.add_norm(x, delta, layer.input_norm, eps)
        attended = attend(i, layer, k.linear(h, layer.qkv, layer.qkv_bias))
        h = k.add_norm(x, k.linear_parts(attended, layer.out), layer.post_norm, eps)
        delta = k.linear_parts(k.linear_gated(h, layer.gate_up), layer.down)
    return k.add_norm(x, delta, weights.norm, eps)


def _one_row(eps: float, weights: Weights, x: Tensor, attend: Attend, *, exact: bool) -> Tensor:
    """The layers of a batch of one row, in fewer launches."""
    delta: Tensor | None = None
    k = exact_kernels if exact else kernels
    parts = exact_kernels.linear_parts if exact else kernels.linear
    norm_linear = partial(single_row.norm_linear, eps=eps, exact=exact)
    for i, layer in enumerate(weights.layers):
        x, product = norm_linear(x, delta, layer.input_norm, layer.qkv, layer.qkv_bias)
        attended = attend(i, layer, product if exact else product[None])
        delta = parts(attended, layer.out)
        x, inner = norm_linear(x, delta, layer.post_norm, layer.gate_up, gated=True)
        delta = parts(inner, layer.down)
    return k.add_norm(x, delta, weights.norm, eps)
