"""TRL's logprobs with the engine's bits: the model's own head and a softmax, not its fused one.

On a CPU rows are packed without padding, and a prompt that several completions follow is computed
once: TRL's own pass computes every row as long as the longest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.engine.numerics.packing import PackedRow, pack

TEXT = {"input_ids", "attention_mask"}
"""What a pass over text is called with; anything else needs the model's own way of batching."""


def use_exact_head(model: Any, temperature: float) -> None:
    """Has `model(labels=..., fused_lm_head=True)` give the logprobs that the engine samples by.

    TRL multiplies by the head in tiles of its own and sums otherwise than a softmax does: the
    logprobs of a model that `exact.prepare` has seen are then off by some 1e-7.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    fused, multiple = base.forward, exact.row_multiple_of(model)

    @functools.wraps(type(base).forward)
    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **options: Any) -> Any:
        if not fused_lm_head or labels is None or options.get("output_router_logits"):
            return fused(*args, fused_lm_head=fused_lm_head, labels=labels, **options)
        count = options.pop("num_items_in_batch", None)
        packed = None
        if not args and set(options) == TEXT and exact.packs(base):
            packed = _pack(options["input_ids"], options["attention_mask"], labels, multiple)
        if packed is not None:
            logprobs_BT, entropy_BT = packed.score(fused, labels, temperature)
        else:
            keep = _scored(labels)
            logits = fused(*args, use_cache=False, logits_to_keep=keep, **options).logits
            logprobs_BT, entropy_BT = _logprobs(logits, labels, keep, temperature)
        scored = (labels[:, 1:] != -100).sum().clamp(min=1)
        return FusedCausalLMOutput(
            loss=-logprobs_BT.sum() / (scored if count is None else count),
            log_probs=logprobs_BT,
            entropy=entropy_BT,
        )

    base.forward = forward


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a batch (B, T) in one row: which of its tokens are scored, given those before."""

    row: PackedRow
    before_N: Tensor
    at_N: Tensor
    place_N: Tensor
    """Where each scored token is in (B, T - 1), flat."""

    def score(self, model: Any, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs of labels after the first (B, T - 1), 0 where there is none, and entropies."""
        logits_NV = model(**self.row.arguments(), logits_to_keep=self.before_N).logits[0]
        chosen_N, entropy_N = _chosen(logits_NV, self.row.ids_T[self.at_N], temperature)
        shape = labels.shape[0], labels.shape[1] - 1
        nothing = chosen_N.new_zeros(shape[0] * shape[1])
        return (
            nothing.index_copy(0, self.place_N, chosen_N).view(shape),
            nothing.index_copy(0, self.place_N, entropy_N).view(shape),
        )


def _pack(
    ids_BT: Tensor, mask_BT: Tensor, labels_BT: Tensor, multiple: int = 1
) -> PackedRows | None:
    """The rows without their padding; None where a row has padding between its tokens."""
    ids, mask, labels = (part.numpy() for part in (ids_BT, mask_BT.bool(), labels_BT))
    width = ids.shape[1]
    sequences, scored, places = [], [], []
    for at in range(len(ids)):
        tokens = np.flatnonzero(mask[at])
        first = int(tokens[0]) if len(tokens) else 0
        if not len(tokens) or tokens[-1] - first + 1 != len(tokens):
            return None
        own = np.flatnonzero(labels[at] != -100)
        own = own[own > first]
        sequences.append(ids[at, tokens].tolist())
        scored.append(own - first)
        places.append(at * (width - 1) + own - 1)
    if not sum(map(len, scored)):
        return None
    shared = [int(own[0]) if len(own) else 0 for own in scored]
    row = pack(sequences, shared, multiple=multiple)
    pairs = list(zip(row.tokens_of, scored, strict=True))
    before_N, at_N = (
        torch.from_numpy(np.concatenate([tokens[own - back] for tokens, own in pairs]))
        for back in (1, 0)
    )
    return PackedRows(row, before_N, at_N, torch.from_numpy(np.concatenate(places)))


def _scored(labels_BT: Tensor) -> int:
    """How many last positions have logits that a label needs."""
    wanted = (labels_BT[:, 1:] != -100).any(0).nonzero()
    length = int(labels_BT.shape[1])
    return length - (int(wanted[0]) if len(wanted) else length - 2)


def _logprobs(
    logits_BTV: Tensor, labels_BT: Tensor, keep: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same of a padded batch, from the logits of its last `keep` positions."""
    labels_BK, ahead = labels_BT[:, -keep:], labels_BT.shape[1] - keep
    mask_BK, ids_BK = labels_BK[:, 1:] != -100, labels_BK[:, 1:].clamp(min=0)
    whole_BT, entropy_BT = (
        torch.nn.functional.pad(part.masked_fill(~mask_BK, 0.0), (ahead, 0))
        for part in _chosen(logits_BTV[:, :-1], ids_BK, temperature)
    )
    return whole_BT, entropy_BT


def _chosen(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The logprobs of these ids under logits (..., vocab), and the entropies."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    every = torch.log_softmax(logits, dim=-1)
    return every.gather(-1, ids[..., None]).squeeze(-1), -(every.exp() * every).sum(-1)
