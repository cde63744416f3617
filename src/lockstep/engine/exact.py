"""Exact logprobs for trainers: a transformers model that computes as the engine, bit for bit.

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    exact.prepare(model)
    logprobs = exact.token_logprobs(model, sample.token_ids)    # differentiable

Holds for fp32 on a CPU, and for bf16, fp16 and fp32 on a GPU, where the engine's self-test passed
(`engine.arithmetic == "exact"`).
"""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.forward_pass import (
    ATTENTION_NAME,
    chosen_logprobs,
    head_dim_of,
    packs,
    products_of,
    row_multiple_of,
    sample_logprobs,
    token_logprobs,
)
from lockstep.engine.model.arithmetic import gelu_tanh, in_safe_pieces, mix_experts, silu
from lockstep.engine.numerics import mkl
from lockstep.engine.numerics.block_shapes import (
    MULTIPLES,
    Products,
    row_multiple,
    shared_products_hold,
    why_unfit,
)
from lockstep.engine.numerics.packing import PackedRow
from lockstep.engine.numerics.plan import (
    make_reproducible,
    plan,
    warn_of_fallback,
    why_not_portable,
)
from lockstep.engine.numerics.segments import key_ranges, segment_attention, segment_mask
from lockstep.tokens.errors import NotExact
from lockstep.tokens.numerics import ArithmeticName, NumericsPlan

__all__ = [
    "attention",
    "check_plan",
    "chosen_logprobs",
    "experts",
    "own_plan",
    "packs",
    "prepare",
    "products_of",
    "row_multiple_of",
    "sample_logprobs",
    "token_logprobs",
]


def prepare(model: Any, *, strict: bool = True, portable: bool = False) -> Any:
    """Make a transformers causal LM compute as the engine does, bit for bit; return the model.

    Call it before the first matrix product of the process if possible. With `portable` the results
    are the same on every make of x86 CPU. Raises NotExact, with a way to fix it, when this process
    cannot compute exactly; with `strict=False` it logs a warning and prepares the model anyway.

    Any batch of causal sequences works: padded on the right or (with an attention_mask) on the
    left, packed (with position_ids), with a cache, of any length. Other masks raise NotExact when
    used, and so does torch.compile. Add PEFT adapters before calling `prepare`.
    """
    if model.device.type == "cuda":
        return _prepare_on_device(model)
    config = model.config.get_text_config()
    if problem := _unready(products_of(config), head_dim_of(config), portable=portable):
        if strict:
            raise NotExact(problem)
        warn_of_fallback(problem)
    from transformers.activations import GELUTanh, SiLUActivation

    _register()
    model.set_attn_implementation(ATTENTION_NAME)
    if getattr(config, "num_experts", 0):
        model.set_experts_implementation(ATTENTION_NAME)
    if not shared_products_hold(products_of(config)):
        # Without MKL's strict mode, a shared product is split among threads into row counts that
        # are not the row multiple, and other row counts may be summed in another order.
        model.register_forward_pre_hook(lambda *_: mkl.share_products(False))
        model.register_forward_hook(lambda *_: mkl.share_products(True), always_call=True)
    multiple = row_multiple_of(model)
    for module in model.modules():
        if isinstance(module, torch.nn.SiLU | SiLUActivation | GELUTanh):
            function = gelu_tanh if isinstance(module, GELUTanh) else silu
            module.forward = partial(_in_whole_rows, multiple, function)  # type: ignore[method-assign]
        # Cosines and sines are elementwise loops, whose last values differ with the threads.
        if hasattr(module, "rotary_emb"):
            module.rotary_emb.forward = partial(_rotation, multiple, module.rotary_emb)
            # `prepare` may be called again: one hook is enough.
            if not hasattr(module, "_lockstep_positions"):
                module._lockstep_positions = module.register_forward_pre_hook(
                    _count_positions, with_kwargs=True
                )
        if isinstance(module, torch.nn.Linear) or type(module).__name__.endswith("Router"):
            computed = type(module).forward.__get__(module)
            module.forward = partial(_in_whole_rows, multiple, computed)
    return model


def _prepare_on_device(model: Any) -> Any:
    from lockstep.engine.cuda.trainer import prepare_modules

    prepare_modules(model)
    _register()
    model.set_attn_implementation(ATTENTION_NAME)
    if getattr(model.config.get_text_config(), "num_experts", 0):
        model.set_experts_implementation(ATTENTION_NAME)
    return model


def _register() -> None:
    """Register the functions of this module with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, segment_mask)
    ALL_EXPERTS_FUNCTIONS.register(ATTENTION_NAME, experts)


def own_plan(
    directory: Path, *, device: str = "cpu", dtype: str = "float32", portable: bool = False
) -> NumericsPlan:
    """Return how this process would compute the model in `directory` after `prepare`.

    Compare it with a worker's plan by `check_plan`. Raises CheckpointError when there is no model.
    """
    config = ModelConfig.read(directory)
    if device.startswith("cuda") and not config.traits.has_kernels:
        reason = f"there are no exact kernels for {config.family} on GPUs"
        return plan("close", device=device, dtype=dtype, rows=0, reason=reason)
    if device.startswith("cuda") and find_spec("triton") is not None:
        return plan("exact", device=device, dtype=dtype, rows=0)
    if device != "cpu" or dtype != "float32":
        reason = f"exact needs fp32 on a CPU, or a GPU and Triton, not {dtype} on {device}"
        return plan("close", device=device, dtype=dtype, rows=0, reason=reason)
    if problem := _unready(config.products, config.head_dim, portable=portable):
        warn_of_fallback(problem)
    name: ArithmeticName = "portable" if portable else "exact"
    return plan(
        "close" if problem else name,
        device=device,
        dtype=dtype,
        rows=row_multiple(config.products),
        reason=problem or "",
    )


def check_plan(worker: NumericsPlan, trainer: NumericsPlan) -> None:
    """Raise NotExact, with the reason and a way out, when the two plans cannot agree."""
    if problem := trainer.mismatch(worker):
        raise NotExact(
            f"the logprobs of this trainer and of its workers cannot be equal bit for bit: "
            f"{problem}. Run both on CPUs of one type with one version of torch and equal values "
            "of MKL_CBWR and ATEN_CPU_CAPABILITY, or all of them with arithmetic portable, or "
            "train in close mode"
        )


def _unready(required: Products, dim: int, *, portable: bool) -> str | None:
    """Return why this process cannot compute exactly and how to fix it, or None when it can."""
    in_time = make_reproducible(portable=portable)
    if portable and (problem := why_not_portable()):
        return f"portable arithmetic does not hold here: {problem}"
    problem = why_unfit(dim, required)
    if problem is None:
        return None
    if in_time:
        return f"exact arithmetic does not hold on this CPU: {problem}"
    return (
        f"exact arithmetic does not hold in this process: {problem}. It had computed before MKL "
        f"could be made reproducible: start it with `export MKL_CBWR={os.environ['MKL_CBWR']}`, or "
        "call lockstep.engine.numerics.plan.make_reproducible() before its first matrix product"
    )


def _in_whole_rows(multiple: int, function: Any, x: Tensor) -> Any:
    """Apply a row-wise function to x (..., width), padded to a row multiple that keeps the bits."""
    x = x.contiguous()  # a part of a wider product would be computed in other pieces
    rows = x.numel() // x.shape[-1]
    missing = -rows % multiple
    if not missing:
        return function(x)
    out = function(F.pad(x.reshape(rows, -1), (0, 0, 0, missing)))
    if isinstance(out, Tensor):
        return out[:rows].reshape(*x.shape[:-1], -1)
    return tuple(part[:rows] for part in out)


def _count_positions(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count positions from the first real token of a left-padded row, as the engine does.

    A forward pre-hook. It does nothing when the caller passed position_ids.
    """
    mask = kwargs.get("attention_mask")
    if mask is None or mask.dim() != 2 or kwargs.get("past_key_values") is not None:
        return None
    if kwargs.get("position_ids") is not None or bool(mask[:, :1].all()):
        return None
    return args, kwargs | {"position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def _rotation(
    multiple: int, rotary: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return rotary cosines and sines, with the same bits in any number of threads.

    Models whose kinds of layers rotate differently name the kind.
    """
    if getattr(rotary, "rope_type", "") == "longrope":
        limit = int(rotary.config.original_max_position_embeddings)
        if int(position_ids.max()) >= limit:
            raise NotExact(f"a prepared model of this architecture takes at most {limit} tokens")
    kind = "" if layer_type is None else f"{layer_type}_"
    with torch.no_grad():
        frequencies = getattr(rotary, f"{kind}inv_freq").float()
        angles = position_ids[:, :, None].float() * frequencies
        both = torch.cat((angles, angles), dim=-1)
        scale = getattr(rotary, f"{kind}attention_scaling")
        cos, sin = (
            _in_whole_rows(multiple, partial(in_safe_pieces, turn), both) * scale
            for turn in (torch.cos, torch.sin)
        )
        return cos.to(x.dtype), sin.to(x.dtype)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_row: PackedRow | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention for transformers' AttentionInterface.

    Attends over the key ranges of `segment_mask`, or over sequences packed by `packing.pack`.
    Raises NotExact under torch.compile, which changes the bits.
    """
    if torch.compiler.is_compiling():
        raise NotExact("torch.compile gives other bits: call the prepared model without it")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_row is not None:
        return packed_row.attention(query, key, value, scale, sliding_window or 0), None
    ranges = attention_mask
    if ranges is not None and ranges.dim() == 4:  # a mask that the caller built
        ranges = key_ranges(ranges)
    return segment_attention(query, key, value, ranges, scale, sliding_window or 0), None


def experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of experts for transformers' ExpertsInterface."""
    if hidden.is_cuda:
        from lockstep.engine.cuda.trainer import mix

        return mix(hidden, ids, weights, module.gate_up_proj, module.down_proj)
    multiple = row_multiple(products_of(module.config)) or MULTIPLES[-1]
    return mix_experts(hidden, ids, weights, module.gate_up_proj, module.down_proj, multiple)
