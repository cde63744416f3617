"""The trainer's side of exactness: a transformers model with the engine's logprobs, bit for bit.

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    exact.prepare(model)
    logprobs = exact.token_logprobs(model, sample.token_ids)    # differentiable

Holds for fp32 on the CPU, where the engine's self-test passed (`engine.arithmetic == "exact"`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.arithmetic import HIDDEN, exact_attention, mix_experts, round_up
from lockstep.engine.block_shapes import (
    MULTIPLES,
    Products,
    attention_shapes,
    products,
    row_multiple,
)
from lockstep.engine.numerics import make_reproducible
from lockstep.tokens.errors import BadRequest

NAME = "lockstep_exact"


def prepare(model: Any) -> Any:
    """Makes a transformers causal LM compute attention and experts the engine's way; returns it."""
    make_reproducible()
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    model.set_attn_implementation(NAME)
    if getattr(model.config, "num_experts", 0):
        model.set_experts_implementation(NAME)
    return model


def products_of(config: Any) -> Products:
    """The matrix products of a transformers model with this config: the engine's for its model."""
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = range(config.num_hidden_layers)
    experts = getattr(config, "num_experts", 0) or 0
    dense = getattr(config, "mlp_only_layers", None) or ()
    step = getattr(config, "decoder_sparse_step", 1)
    routed = [at for at in layers if experts and at not in dense and (at + 1) % step == 0]
    return products(
        hidden=config.hidden_size,
        q_size=heads * dim,
        kv_size=(config.num_key_value_heads or heads) * dim,
        vocab=config.vocab_size,
        intermediate=config.intermediate_size if len(routed) < len(layers) else 0,
        experts=experts if routed else 0,
        expert_intermediate=config.moe_intermediate_size if routed else 0,
    )


def rows_of(model: Any) -> int:
    """The multiple to which sequences of this model are padded: the engine's, found the same way.

    With adapters of PEFT on it, the multiple that holds for their ranks too.
    """
    wanted = products_of(model.config.get_text_config())
    found = [row_multiple(wanted)]
    for adapter in getattr(model, "peft_config", {}).values():
        found.append(row_multiple(wanted.with_lora(adapter.r)))
    return max(found) if all(found) else MULTIPLES[-1]


def token_logprobs(
    model: Any, token_ids: Sequence[int] | Sequence[Sequence[int]], temperature: float = 1.0
) -> Tensor | list[Tensor]:
    """The logprob of each token after the first, given those before it.

    One sequence gives a tensor of length len - 1, several give a list of them. `temperature` other
    than 1 gives the logprobs the engine reports in `processed` mode. Raises BadRequest for an empty
    sequence.
    """
    if not token_ids:
        raise BadRequest("token_ids is empty: at least one sequence is needed", param="token_ids")
    if isinstance(token_ids[0], int):
        return _batch(model, [list(token_ids)], temperature)[0]  # type: ignore[arg-type]
    return _batch(model, [list(ids) for ids in token_ids], temperature)  # type: ignore[arg-type]


def _batch(model: Any, sequences: list[list[int]], temperature: float) -> list[Tensor]:
    if not all(sequences):
        at = next(at for at, ids in enumerate(sequences) if not ids)
        raise BadRequest(f"token_ids[{at}] is empty", param=f"token_ids[{at}]")
    width = round_up(max(map(len, sequences)), rows_of(model))
    rows = [ids + [0] * (width - len(ids)) for ids in sequences]
    ids = torch.tensor(rows, device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits[:, :-1], dim=-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return [chosen[row, : len(sequence) - 1] for row, sequence in enumerate(sequences)]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention for transformers' AttentionInterface; sequences are padded on the right."""
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    good = attention_shapes(dim)
    group, padded, keys = heads // kv_heads, round_up(length, good.prefill), good.keys(length)
    grouped = query.reshape(batch * kv_heads, group, length, dim)
    shape = batch * kv_heads, group, keys, dim
    out = exact_attention(
        F.pad(grouped, (0, 0, 0, padded - length)),
        F.pad(key, (0, 0, 0, keys - length)).reshape(-1, 1, keys, dim).expand(shape),
        F.pad(value, (0, 0, 0, keys - length)).reshape(-1, 1, keys, dim).expand(shape),
        torch.full((padded, keys), HIDDEN, device=query.device).triu_(1),
        dim**-0.5 if scaling is None else scaling,
    )
    out = out[:, :, :length].reshape(batch, heads, length, dim)
    return out.transpose(1, 2).contiguous(), None


def experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The sum of experts for transformers' ExpertsInterface."""
    multiple = row_multiple(products_of(module.config)) or MULTIPLES[-1]
    return mix_experts(hidden, ids, weights, module.gate_up_proj, module.down_proj, multiple)


def _no_mask(*_: Any, **__: Any) -> None:
    """The attention above is causal by itself and takes no mask."""
