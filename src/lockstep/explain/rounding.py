"""Rounding of weights, keys and values to the formats that engines store them in."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.explain.setting import Rounding

FP8_LARGEST = 448.0
"""Largest value of float8 e4m3."""
INT4_GROUP = 128
"""Values that share a scale in the usual 4-bit formats."""


def round_weight(weight: Tensor, kind: Rounding) -> Tensor:
    """Return a weight matrix (rows, columns) as an engine holds it in this format.

    8-bit integers have a scale per row, 8-bit floats one per tensor, 4-bit integers one per group.
    """
    if kind in ("bfloat16", "float16"):
        return _through(weight, kind)
    if kind == "fp8":
        return _scaled_fp8(weight, weight.abs().amax())
    if kind == "int8":
        return _scaled_int(weight, weight.abs().amax(dim=-1, keepdim=True), 127)
    columns = weight.shape[-1]
    size = INT4_GROUP if columns % INT4_GROUP == 0 else columns
    groups = weight.reshape(-1, size)
    return _scaled_int(groups, groups.abs().amax(dim=-1, keepdim=True), 7).reshape(weight.shape)


def round_values(values: Tensor, kind: Rounding) -> Tensor:
    """Return keys, values or activations (..., width) as a cache holds them in this format."""
    if kind in ("bfloat16", "float16"):
        return _through(values, kind)
    if kind == "fp8":  # engines use the scale 1 unless a checkpoint has scales
        held = values.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
        return held.to(values.dtype)
    largest = values.abs().amax(dim=-1, keepdim=True)
    return _scaled_int(values, largest, 127 if kind == "int8" else 7)


def _through(values: Tensor, dtype: str) -> Tensor:
    return values.to(getattr(torch, dtype)).to(values.dtype)


def _scaled_fp8(values: Tensor, largest: Tensor) -> Tensor:
    scale = largest.clamp(min=1e-12) / FP8_LARGEST
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


def _scaled_int(values: Tensor, largest: Tensor, steps: int) -> Tensor:
    scale = largest.clamp(min=1e-12) / steps
    return (values / scale).round().clamp(-steps, steps) * scale
