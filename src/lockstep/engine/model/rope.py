"""Rotary position embedding: the frequencies of a model, and the rotation by them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.engine.config import Llama3Rope, ModelConfig


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Write the rotary position embedding of x (rows, heads, d) to `out`, which may be x."""
    torch.add(x * cos, x.roll(x.shape[-1] // 2, -1).mul_(sin), out=out)


def frequencies(config: ModelConfig) -> Tensor:
    """Return the rotary frequencies, fp32, in the operation order of transformers."""
    if config.rope_long is not None:
        factors = torch.tensor(config.rope_long.factors, dtype=torch.float32)
        return _unscaled(config.rope_theta, rotated_width(config), factors)
    plain = _unscaled(config.rope_theta, rotated_width(config))
    if config.rope_llama3 is not None:
        return _scale_llama3(plain, config.rope_llama3)
    return plain if config.rope_factor == 1.0 else plain / config.rope_factor


def window_frequencies(config: ModelConfig) -> Tensor | None:
    """Return the rotary frequencies of windowed layers, None if all layers have the same."""
    theta = config.traits.window_theta
    return None if theta is None else _unscaled(theta, config.head_dim)


def rotated_width(config: ModelConfig) -> int:
    """Return how many values of each head are rotated."""
    return int(config.head_dim * config.traits.rotated)


def _unscaled(theta: float, width: int, factors: Tensor | float = 1.0) -> Tensor:
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return 1.0 / (factors * theta**exponents)


def _scale_llama3(plain: Tensor, rope: Llama3Rope) -> Tensor:
    wavelength = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    slow = torch.where(wavelength > longest, plain / rope.factor, plain)
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * slow / rope.factor + blend * slow
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(between, blended, slow)
