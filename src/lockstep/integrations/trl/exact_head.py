"""TRL's logprobs with the engine's bits: the model's own head and a softmax, not its fused one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def use_exact_head(model: Any, temperature: float) -> None:
    """Has `model(labels=..., fused_lm_head=True)` give the logprobs that the engine samples by.

    TRL multiplies by the head in tiles of its own and sums otherwise than a softmax does: the
    logprobs of a model that `exact.prepare` has seen are then off by some 1e-7.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    fused = base.forward

    @functools.wraps(type(base).forward)
    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **options: Any) -> Any:
        if not fused_lm_head or labels is None or options.get("output_router_logits"):
            return fused(*args, fused_lm_head=fused_lm_head, labels=labels, **options)
        keep = _scored(labels)
        logits_BTV = fused(*args, use_cache=False, logits_to_keep=keep, **options).logits.float()
        logprobs_BT, entropy_BT = _logprobs(logits_BTV, labels[:, -keep:], temperature)
        ahead = labels.shape[1] - keep
        whole_BT = torch.nn.functional.pad(logprobs_BT, (ahead, 0))
        scored = (labels[:, 1:] != -100).sum().clamp(min=1)
        count = options.get("num_items_in_batch")
        return FusedCausalLMOutput(
            loss=-whole_BT.sum() / (scored if count is None else count),
            log_probs=whole_BT,
            entropy=torch.nn.functional.pad(entropy_BT, (ahead, 0)),
        )

    base.forward = forward


def _scored(labels_BT: Tensor) -> int:
    """How many last positions have logits that a label needs."""
    wanted = (labels_BT[:, 1:] != -100).any(0).nonzero()
    length = int(labels_BT.shape[1])
    return length - (int(wanted[0]) if len(wanted) else length - 2)


def _logprobs(logits_BTV: Tensor, labels_BT: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob of every label after the first, 0 where there is none, and the entropy there."""
    if temperature != 1.0:
        logits_BTV = logits_BTV / temperature
    every_BTV = torch.log_softmax(logits_BTV[:, :-1], dim=-1)
    mask_BT, ids_BT = labels_BT[:, 1:] != -100, labels_BT[:, 1:].clamp(min=0)
    chosen_BT = every_BTV.gather(-1, ids_BT[..., None]).squeeze(-1)
    entropy_BT = -(every_BTV.exp() * every_BTV).sum(-1)
    return chosen_BT.masked_fill(~mask_BT, 0.0), entropy_BT.masked_fill(~mask_BT, 0.0)
