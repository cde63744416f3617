"""The layers of a dense model on a CUDA device; attention is left to whoever runs them."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda import kernels
from lockstep.engine.weights.weights import Layer, Weights

Attend = Callable[[int, Layer, Tensor], Tensor]
"""The attention of one layer: its number, its weights, and the parts of the product that holds
queries, keys and values. Returns (rows, heads * dim)."""


def forward(config: ModelConfig, weights: Weights, ids: Tensor, attend: Attend) -> Tensor:
    """Normed hidden states of all rows, (rows, hidden)."""
    eps = config.eps
    x = F.embedding(ids, weights.embed)
    delta: Tensor | None = None
    for i, layer in enumerate(weights.layers):
        h = kernels.add_norm(x, delta, layer.input_norm, eps)
        attended = attend(i, layer, kernels.linear(h, layer.qkv, layer.qkv_bias))
        h = kernels.add_norm(x, kernels.linear(attended, layer.out), layer.post_norm, eps)
        inner = kernels.gate(kernels.linear(h, layer.gate_up), x.dtype)
        delta = kernels.linear(inner, layer.down)
    return kernels.add_norm(x, delta, weights.norm, eps)
