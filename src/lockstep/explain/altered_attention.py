"""Attention as a faulty engine or trainer computes it: rounded, stale, windowed, without a mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.explain.rounding import round_values
from lockstep.explain.setting import Rounding

NAME = "lockstep_explain"


class AlteredAttention:
    """Causal attention over one sequence, with changed keys and values.

    With `window`, a token sees that many tokens including itself. `recording` keeps keys and values
    of all layers; `stale` of another pass replace those of the first `boundary` positions.
    """

    def __init__(self, kv: Rounding | None = None, window: int | None = None) -> None:
        self.kv = kv
        self.window = window
        self.recording = False
        self.stale: dict[int, tuple[Tensor, Tensor]] = {}
        self.boundary = 0

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention for transformers' AttentionInterface; other masks are ignored."""
        if self.kv is not None:
            key, value = round_values(key, self.kv), round_values(value, self.kv)
        if self.recording:
            self.stale[module.layer_idx] = key, value
        elif self.boundary:
            before, end = self.stale[module.layer_idx], self.boundary
            key, value = (
                torch.cat((old[:, :, :end], new[:, :, end:]), dim=2)
                for old, new in zip(before, (key, value), strict=True)
            )
        length = query.shape[2]
        at = torch.arange(length, device=query.device)
        distance = at[:, None] - at[None, :]
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    @contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Let the model attend so within the block."""
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, self.attend)
        AttentionMaskInterface.register(NAME, _no_mask)
        before = model.config.get_text_config()._attn_implementation
        model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


def _no_mask(*_: Any, **__: Any) -> None:
    return None
