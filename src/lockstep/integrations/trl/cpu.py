"""AsyncGRPOTrainer on a CPU: plain PyTorch attention in place of TRL's GPU kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def enable_cpu() -> None:
    """Allow an AsyncGRPOTrainer without a GPU. Call it before creating the trainer."""
    if torch.cuda.is_available():
        return
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernels = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    packing._flash_attn = lambda: kernels
    # It reads the name of the CUDA device to report utilization.
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Return causal attention of several sequences in one row, queries aligned to the last keys.

    Raises ValueError for windows and non-causal attention, which TRL does not use here.
    """
    if not causal or window_size != (-1, -1):
        raise ValueError(f"causal={causal}, window_size={window_size} needs TRL's GPU kernel")
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows = []
    for at in range(len(queries) - 1):
        q = query[queries[at] : queries[at + 1]].transpose(0, 1)[None]
        k = key[keys[at] : keys[at + 1]].transpose(0, 1)[None]
        v = value[keys[at] : keys[at + 1]].transpose(0, 1)[None]
        offset = k.shape[2] - q.shape[2]
        causal_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(offset)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=causal_mask, scale=softmax_scale, enable_gqa=True
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)
