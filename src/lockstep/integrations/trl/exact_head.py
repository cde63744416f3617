"""TRL's logprobs as the engine computes them, by the model's own head instead of TRL's fused one.

On a CPU the rows of a batch are packed without padding, and a prompt of several completions is
computed once. TRL's own pass pads every row to the longest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.forward_pass import (
    Ints,
    TokenRows,
    entropies,
    packs,
    row_multiple_of,
    shaped_logits,
    tempered_logprobs,
    token_logits,
)
from lockstep.integrations.draws import DrawnRows, support_of
from lockstep.tokens.errors import BadRequest, BadSupport

TEXT_INPUTS = {"input_ids", "attention_mask"}
"""The arguments of a pass over text. A pass with any other argument is not packed."""
NO_LABEL = -100


def use_own_head(model: Any, temperature: float, draws: DrawnRows, *, exact: bool) -> None:
    """Make `model(labels=..., fused_lm_head=True)` return the logprobs that the engine samples by.

    TRL multiplies by the head in tiles and sums in another order than a softmax does, so that the
    logprobs of a model prepared by `exact.prepare` would differ by about 1e-7. And it knows neither
    penalties nor the sets of truncated distributions: rows of `draws` are scored with both. Without
    `exact`, TRL's own head computes everything else.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    fused, multiple = base.forward, row_multiple_of(model)

    @functools.wraps(type(base).forward)
    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **options: Any) -> Any:
        has_router_loss = options.get("output_router_logits")
        if fused_lm_head and draws and has_router_loss:
            raise BadRequest(
                "router_aux_loss_coef is set, but tokens were drawn with options such as top_p, "
                "without which the loss of routers is computed: sample without them, or set it to "
                "0",
                param="router_aux_loss_coef",
            )
        if not fused_lm_head or labels is None or has_router_loss or not (exact or draws):
            return fused(*args, fused_lm_head=fused_lm_head, labels=labels, **options)
        count = options.pop("num_items_in_batch", None)
        packed = None
        if not args and set(options) == TEXT_INPUTS and (packs(base) or draws):
            ids, mask = options["input_ids"], options["attention_mask"]
            packed = pack_batch(base, ids, mask, labels, multiple=multiple)
        if packed is not None:
            logprobs_BT, entropy_BT = packed.score(fused, labels, temperature, draws)
        else:
            keep = _labelled_tail(labels)
            logits = fused(*args, use_cache=False, logits_to_keep=keep, **options).logits
            logprobs_BT, entropy_BT = _padded_logprobs(logits, labels, keep, temperature)
        scored = (labels[:, 1:] != NO_LABEL).sum().clamp(min=1)
        return FusedCausalLMOutput(
            loss=-logprobs_BT.sum() / (scored if count is None else count),
            log_probs=logprobs_BT,
            entropy=entropy_BT,
        )

    base.forward = forward


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The rows of a batch (B, T) without their padding, and the positions that have a label."""

    sequences: list[list[int]]
    rows: TokenRows
    positions: list[Ints]
    place_N: Tensor
    """The index of each scored token in (B, T - 1), flat."""

    def score(
        self, model: Any, labels: Tensor, temperature: float, draws: DrawnRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the logprobs of labels after the first and the entropies there, (B, T - 1) each.

        Both are 0 where there is no label, and those of the distributions that `draws` has. Raises
        BadSupport for a row that is not among them, unless there are none.
        """
        logits_NV, ids_N = token_logits(model, self.rows, self.positions)
        if draws:
            logits_NV, temperature = self._shape(logits_NV.float(), temperature, draws), 1.0
        chosen_N, entropy_N = _chosen(logits_NV, ids_N, temperature)
        shape = labels.shape[0], labels.shape[1] - 1
        zeros = chosen_N.new_zeros(shape[0] * shape[1])
        return (
            zeros.index_copy(0, self.place_N, chosen_N).view(shape),
            zeros.index_copy(0, self.place_N, entropy_N).view(shape),
        )

    def _shape(self, logits_NV: Tensor, temperature: float, draws: DrawnRows) -> Tensor:
        parts = logits_NV.split([len(at) for at in self.positions])
        shaped = []
        for own_NV, ids, at in zip(parts, self.sequences, self.positions, strict=True):
            drawn = draws.find(ids)
            if len(at) and not drawn:
                raise BadSupport(
                    f"a row of {len(ids)} tokens is not one that was sampled, so that the sets of "
                    "its tokens are unknown: leave rows as they were sampled, or sample without "
                    "options such as top_p"
                )
            spans = [own.span for own in drawn]
            support = support_of(drawn, len(ids))
            shaped.append(shaped_logits(own_NV, at, ids, spans, temperature, support=support))
        return torch.cat(shaped)


def pack_batch(
    model: Any, ids_BT: Tensor, mask_BT: Tensor, labels_BT: Tensor, *, multiple: int | None = None
) -> PackedBatch | None:
    """Return the batch without its padding; None where a row has padding between its tokens.

    A model that cannot be called with a packed row gets padded ones.
    """
    ids, mask, labels = (part.numpy() for part in (ids_BT, mask_BT.bool(), labels_BT))
    width = ids.shape[1]
    sequences, positions, places = [], [], []
    for at in range(len(ids)):
        tokens = np.flatnonzero(mask[at])
        first = int(tokens[0]) if len(tokens) else 0
        if not len(tokens) or tokens[-1] - first + 1 != len(tokens):
            return None
        labelled = np.flatnonzero(labels[at] != NO_LABEL)
        labelled = labelled[labelled > first]
        sequences.append(ids[at, tokens].tolist())
        positions.append(labelled - first)
        places.append(at * (width - 1) + labelled - 1)
    if not sum(map(len, positions)):
        return None
    rows = TokenRows.arrange(model, sequences, multiple=multiple)
    return PackedBatch(sequences, rows, positions, torch.from_numpy(np.concatenate(places)))


def _labelled_tail(labels_BT: Tensor) -> int:
    """Return how many last positions the logits of all labels need."""
    labelled = (labels_BT[:, 1:] != NO_LABEL).any(0).nonzero()
    length = int(labels_BT.shape[1])
    return length - (int(labelled[0]) if len(labelled) else length - 2)


def _padded_logprobs(
    logits_BTV: Tensor, labels_BT: Tensor, keep: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """`PackedBatch.score` for a padded batch, from the logits of its last `keep` positions."""
    labels_BK, ahead = labels_BT[:, -keep:], labels_BT.shape[1] - keep
    mask_BK, ids_BK = labels_BK[:, 1:] != NO_LABEL, labels_BK[:, 1:].clamp(min=0)
    logprobs_BT, entropy_BT = (
        torch.nn.functional.pad(part.masked_fill(~mask_BK, 0.0), (ahead, 0))
        for part in _chosen(logits_BTV[:, :-1], ids_BK, temperature)
    )
    return logprobs_BT, entropy_BT


def _chosen(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the logprobs of these ids under logits (..., vocab), and the entropies."""
    logprobs = tempered_logprobs(logits, temperature)
    # A token that cannot be drawn adds 0, where p log p = 0 * -inf is NaN.
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return logprobs.gather(-1, ids[..., None]).squeeze(-1), entropies(finite)
