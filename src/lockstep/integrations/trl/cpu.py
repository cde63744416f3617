"""AsyncGRPOTrainer on a CPU: TRL's own code, with attention in plain PyTorch for its GPU kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def enable_cpu() -> None:
    """Lets an AsyncGRPOTrainer be made without a GPU; call it before. Does nothing with one."""
    if torch.cuda.is_available():
        return
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    kernels = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    packing._flash_attn = lambda: kernels
    # It asks CUDA for the name of a device, to report how busy that is.
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
    """Causal attention of several sequences in one row, each query aligned to its last key.

    Raises ValueError for what TRL does not use on such models: windows, and no causal mask.
    """
    if not causal or window_size != (-1, -1):
        raise ValueError(f"causal={causal}, window_size={window_size} needs TRL's GPU kernel")
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    rows = []
    for at in range(len(queries) - 1):
        q = query[queries[at] : queries[at + 1]].transpose(0, 1)[None]
        k = key[keys[at] : keys[at + 1]].transpose(0, 1)[None]
        v = value[keys[at] : keys[at + 1]].transpose(0, 1)[None]
        more = k.shape[2] - q.shape[2]
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(more)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)
