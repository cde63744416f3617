"""Exact arithmetic on a GPU for trainers: a transformers model on the engine's kernels.

Forward passes have the engine's bits. Backward passes are ordinary products and torch's
deterministic attention: a gradient need not equal anything bit for bit, it only has to be
reproducible. In fp32, products are computed in fp32 unless TF32 is enabled in torch, which is off
by default and which this module does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda.kernels import exact_kernels as kernels
from lockstep.engine.cuda.kernels.exact_attention import attend_ragged
from lockstep.engine.cuda.kernels.prefill_kernels import tokens_per_block
from lockstep.engine.cuda.kernels.sampling_kernels import token_logprobs
from lockstep.engine.families import FAMILIES
from lockstep.engine.model.arithmetic import in_safe_pieces, mix_experts, route
from lockstep.engine.model.rope import frequencies
from lockstep.tokens.errors import NotExact

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def prepare_modules(model: Any) -> None:
    """Make the modules of a transformers model compute with the engine's kernels.

    Raises NotExact for an unsupported model. Attention is left to the caller.
    """
    config = config_of(model)
    kind = model.dtype
    if kind not in TYPES:
        raise NotExact(f"exact arithmetic on a GPU needs one of {TYPES}, not {kind}")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if module.weight.dtype != kind:
                raise NotExact(
                    f"{name} is {module.weight.dtype}, but the model is {kind}: the engine uses "
                    "one dtype. For adapters: get_peft_model(..., autocast_adapter_dtype=False)"
                )
            module.forward = partial(_linear, module)  # type: ignore[method-assign]
        elif type(module).__name__.endswith("Router"):
            module.forward = partial(_routing, module, config)
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
        # SiLU, norms and rotations are replaced too: torch's kernels round in other places.
        if hasattr(module, "act_fn"):
            module.act_fn.forward = _Silu.apply
        if hasattr(getattr(module, "rotary_emb", None), "inv_freq"):
            module.rotary_emb.forward = partial(_rotation, _RotationTables(config))


def config_of(model: Any) -> ModelConfig:
    """Return the architecture of a transformers model as the engine reads it. Raises NotExact."""
    names = (type(module).__name__ for module in model.modules())
    architectures = [name for name in names if name in FAMILIES]
    if not architectures:
        raise NotExact(
            f"{type(model).__name__} is not supported: expected one of {', '.join(FAMILIES)}"
        )
    raw = model.config.get_text_config().to_dict() | {"architectures": architectures[:1]}
    config = ModelConfig.of(raw, Path("/nonexistent"))
    if not config.traits.has_kernels:
        raise NotExact(f"there are no exact kernels for {architectures[0]} on GPUs: use a CPU")
    return config


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    """Call an autograd function, whose `apply` has no type in torch."""
    apply: Any = function.apply
    out: Tensor = apply(*inputs)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return kernels.linear(rows, weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            (rows @ weight).view_as(x) if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if ctx.biased and of_bias else None,
        )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if x.dim() == 4:  # heads, which the engine norms in another kernel
            return kernels.head_norm(rows, weight, eps).view(x.shape)
        return kernels.add_norm(rows, None, weight, eps).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        wide, slope = x.float(), grad.float()
        size = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normed, weighed = wide * size, slope * weight.float()
        of_x = size * (weighed - normed * (weighed * normed).mean(-1, keepdim=True))
        of_weight = (slope * normed).reshape(-1, x.shape[-1]).sum(0)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return kernels.silu(x.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x,) = grads, ctx.saved_tensors
        wide = x.float()
        share = torch.sigmoid(wide)
        return (grad.float() * share * (1 + wide * (1 - share))).to(x.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, ...], scale: float
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.starts, ctx.scale = starts, scale
        batch, heads, queries, dim = q.shape
        most = tokens_per_block(heads // k.shape[1])
        blocks = [
            (row * queries + at, min(most, queries - at), row, start + at)
            for row, start in enumerate(starts)
            for at in range(0, queries, most)
        ]
        out = attend_ragged(
            q.transpose(1, 2).reshape(batch * queries, heads * dim).contiguous(),
            k.contiguous(),
            v.contiguous(),
            torch.tensor(blocks, dtype=torch.int32, device=q.device),
            scale,
        )
        return out.view(batch, queries, heads, dim).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (q, k, v) = grads, ctx.saved_tensors
        queries, keys = q.shape[2], k.shape[2]
        # Flash attention supports plain causal attention only, without a cache before it.
        whole = queries == keys and not any(ctx.starts)
        with torch.enable_grad(), deterministic(flash=whole and q.dtype != torch.float32):
            leaves = [part.detach().requires_grad_() for part in (q, k, v)]
            mask = None
            if not whole:
                first = torch.tensor(ctx.starts, device=q.device)[:, None, None, None]
                last = first + torch.arange(queries, device=q.device)[:, None]
                mask = torch.arange(keys, device=q.device) <= last
            query, key, value = leaves
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=whole, scale=ctx.scale, enable_gqa=True
            )
            return *torch.autograd.grad(out, leaves, grad), None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.temperature = temperature
        return token_logprobs(logits.contiguous(), tokens, temperature)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (logits, tokens) = grads, ctx.saved_tensors
        heat = ctx.temperature or 1.0
        slope = torch.softmax(logits.float() / heat, -1).neg_()
        slope.scatter_add_(-1, tokens[:, None], torch.ones_like(slope[:, :1]))
        return (slope * (grad / heat)[:, None]).to(logits.dtype), None, None


def logprobs_of(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return the logprob of each row's token, differentiable, with the engine's bits."""
    return _apply(_TokenLogprobs, logits, tokens, temperature)


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Return the attention of consecutive queries, the first of row r at positions[r, 0].

    The GPU version of `segments.attend`. Rows with fewer queries are padded at the end.
    """
    starts = positions[:, 0].tolist()
    if len(starts) == 1:
        starts *= q.shape[0]
    return _apply(_Attention, q, k, v, tuple(starts), scale)


@contextmanager
def deterministic(*, flash: bool) -> Iterator[None]:
    """Select torch's deterministic attention within the block.

    cuDNN is excluded, because its backward pass is not deterministic. Flash attention supports
    neither a mask nor fp32. Those cases use plain products, which hold all scores in memory and are
    as deterministic as the other products here. Torch's deterministic mode would reject them
    because of the workspace of cuBLAS.
    """
    if not flash:
        with sdpa_kernel([SDPBackend.MATH]):
            yield
        return
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(kinds):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


class _RotationTables:
    """Cosines and sines by position, computed on the CPU as the engine does."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        if (device, kind) not in self._tables:
            angles = torch.outer(
                torch.arange(self._config.max_position).float(), frequencies(self._config)
            )
            cos, sin = (
                in_safe_pieces(turn, angles).repeat(1, 2).to(device, kind)
                for turn in (torch.cos, torch.sin)
            )
            self._tables[device, kind] = cos, sin
        return self._tables[device, kind]


def _rotation(turns: _RotationTables, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = turns.on(x.device, x.dtype)
    return cos[position_ids], sin[position_ids]


def mix(hidden: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the weighted sum of each row's experts, differentiable, with the engine's bits."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return _apply(_Linear, x, weight, None)

    def gate(both: Tensor) -> Tensor:
        first, second = both.chunk(2, -1)
        return _apply(_Silu, first) * second

    return mix_experts(hidden, ids, weights, gate_up, down, product=product, gate=gate)


def _routing(module: Any, config: ModelConfig, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, weights and ids of each row's experts, as a transformers router does."""
    logits = _apply(_Linear, hidden.reshape(-1, hidden.shape[-1]), module.weight, None)
    weights, ids = route(logits, config.experts_per_token, config.normalize_top_k)
    return logits, weights, ids


def _linear(module: torch.nn.Linear, x: Tensor) -> Tensor:
    return _apply(_Linear, x, module.weight, module.bias)


def _norm(module: Any, x: Tensor) -> Tensor:
    return _apply(_Norm, x, module.weight, module.variance_epsilon)
