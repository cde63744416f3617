"""Forward passes over datums: the logprob of every target, computed as the engine does.

Where the model computes exactly on a CPU, datums are packed into one row without padding, and what
several of them begin with, such as the prompt of a group, is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.engine.model.arithmetic import round_up
from lockstep.engine.numerics.packing import pack

PASS_TOKENS = 16384
"""Tokens of one forward pass at most, with its padding; one sequence may have more."""
PASS_DATUMS = 64
"""Datums of one forward pass at most. A divisor of the SDK's 1024 datums a chunk: so a call in
several chunks adds up the same gradients in the same order as in one."""
LEARNT_FROM = ("weights", "advantages", "sequence_ratio_mask")
"""Inputs of losses that are 0 where nothing is learnt, as in a prompt."""


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One datum, checked: tokens, targets (N,) or (N, K), and the other inputs of the loss."""

    tokens: list[int]
    targets: Tensor
    inputs: dict[str, Tensor]

    @property
    def beginning(self) -> int:
        """How many tokens come before the first that something is learnt from."""
        learnt = torch.zeros(len(self.tokens), dtype=torch.bool)
        for name in LEARNT_FROM:
            if name in self.inputs:
                learnt |= (self.inputs[name].reshape(len(self.tokens), -1) != 0).any(-1).cpu()
        at = learnt.nonzero()
        return int(at[0]) if len(at) else 0


def batches(items: Sequence[TrainingSequence]) -> list[list[TrainingSequence]]:
    """The items in their order, as many at once as one forward pass takes."""
    batches: list[list[TrainingSequence]] = [[]]
    for at, item in enumerate(items):
        longest = max([len(item.tokens), *(len(each.tokens) for each in batches[-1])])
        full = longest * (len(batches[-1]) + 1) > PASS_TOKENS or at % PASS_DATUMS == 0
        if batches[-1] and full:
            batches.append([])
        batches[-1].append(item)
    return batches


def target_logprobs(model: Any, batch: Sequence[TrainingSequence], multiple: int) -> list[Tensor]:
    """The logprob of every target of these datums, in the shapes of the targets.

    `multiple` is the row multiple of the model's products.
    """
    if exact.packs(model):
        return _packed(model, batch)
    return _padded(model, batch, multiple)


def _packed(model: Any, batch: Sequence[TrainingSequence]) -> list[Tensor]:
    row = pack([item.tokens for item in batch], [item.beginning for item in batch])
    logprobs_TV = torch.log_softmax(model(**row.arguments()).logits[0].float(), dim=-1)
    # Taken at once: every indexing of the logprobs costs a gradient of their size.
    depths = [item.targets.numel() // len(item.tokens) for item in batch]
    at = np.concatenate([np.repeat(a, k) for a, k in zip(row.tokens_of, depths, strict=True)])
    targets = torch.cat([item.targets.reshape(-1) for item in batch])
    chosen = logprobs_TV[torch.from_numpy(at), targets]
    parts = chosen.split([item.targets.numel() for item in batch])
    return [part.view(item.targets.shape) for part, item in zip(parts, batch, strict=True)]


def _padded(model: Any, batch: Sequence[TrainingSequence], multiple: int) -> list[Tensor]:
    width = round_up(max(len(item.tokens) for item in batch), multiple)
    rows = [item.tokens + [0] * (width - len(item.tokens)) for item in batch]
    ids = torch.tensor(rows, device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits
    # Padded and taken at once: a slice of the logits would cost a gradient of their size each.
    depth = max(item.targets.shape[1] if item.targets.ndim == 2 else 1 for item in batch)
    targets = ids.new_zeros((*ids.shape, depth))
    for row, item in enumerate(batch):
        own = item.targets if item.targets.ndim == 2 else item.targets[:, None]
        targets[row, : own.shape[0], : own.shape[1]] = own
    chosen = _chosen(logits, targets)
    return [
        chosen[row, : len(item.tokens), : item.targets.shape[1]]
        if item.targets.ndim == 2
        else chosen[row, : len(item.tokens), 0]
        for row, item in enumerate(batch)
    ]


def _chosen(logits: Tensor, targets: Tensor) -> Tensor:
    """The logprob of each of the targets (batch, tokens, depth), by the engine's own sums."""
    if logits.is_cuda:
        columns = targets.unbind(-1)
        parts = [exact.chosen_logprobs(logits, column) for column in columns]
        return torch.stack(parts, dim=-1)
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, targets)
