"""The kernels in plain torch, up to the order of their sums."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.cuda.kernels.close_kernels import LOG2_E
from lockstep.engine.model.arithmetic import mix_experts


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` in plain torch, up to the order of its sums."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Compute `add_norm` and `head_norm` in plain torch, without changing x."""
    value = (x if delta is None else x + delta).float()
    size = torch.rsqrt((value.double().square().sum(-1) / value.shape[-1]).float() + eps)
    return (value * size[:, None] * weight.float()).to(x.dtype)


def gate(both: Tensor) -> Tensor:
    """Compute `gate` in plain torch, up to the last bit of its exponential."""
    first, second = both.float().chunk(2, -1)
    return ((first / (1 + torch.exp(-first))).to(both.dtype).float() * second).to(both.dtype)


def norm_linear(
    x: Tensor,
    parts: Tensor | None,
    norm: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `norm_linear` in exact arithmetic in plain torch, up to the order of its sums."""
    delta = None if parts is None else parts.sum(0).to(x.dtype)
    normed = add_norm(x, delta, norm, eps)
    out = linear(normed, weight, bias)
    left = x if delta is None else x + delta
    return left, gate(out) if gated else out


def mix(x: Tensor, ids: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute `mix` in plain torch, up to the order of its sums."""
    return mix_experts(
        x, ids, shares, gate_up, down,
        product=linear, gate=gate,
    )  # fmt: skip


def attend_ragged(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor) -> Tensor:
    """Compute `attend_ragged` in plain torch, block by block."""
    _, kv_heads, _, dim = keys.shape
    out = torch.zeros_like(q)
    for first, count, slot, start in blocks.tolist():
        if not count:
            continue
        queries = q[first : first + count].view(count, kv_heads, -1, dim).permute(1, 2, 0, 3)
        k, v = (cache[slot, :, None, : start + count].float() for cache in (keys, values))
        hidden = torch.arange(start + count, device=q.device) > torch.arange(
            start, start + count, device=q.device
        ).unsqueeze(1)
        scores = (queries.float() @ k.mT / LOG2_E).masked_fill(hidden, float("-inf"))
        attended = torch.softmax(scores, -1) @ v
        out[first : first + count] = attended.permute(2, 0, 1, 3).reshape(count, -1).to(q.dtype)
    return out


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute `token_logprobs` in plain torch, up to the order of its sums."""
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    return logprobs.gather(-1, tokens.long()[:, None]).squeeze(-1)
