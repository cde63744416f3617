"""Logprobs of given tokens instead of sampled ones, for prompts and for weight probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.engine.kv.cache import SlotCache
from lockstep.engine.model.lora import Adapter
from lockstep.engine.model.model import Model, Segment
from lockstep.engine.weights.weights import Weights
from lockstep.tokens.errors import BadLogprob, Unavailable

LOGIT_ROWS = 256
"""Rows whose logits are in memory at once: 160 MB with a vocabulary of 150,000."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [start, end) of sequence `at`, computed in `slot`."""

    at: int
    slot: int
    start: int
    end: int


def score_sequences(
    model: Model,
    weights: Weights,
    cache: SlotCache,
    sequences: list[list[int]],
    *,
    adapter: Adapter | None,
    free: range,
    budget: int,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> list[list[float]]:
    """Return the logprob of every token after the first of each sequence.

    Uses the `free` slots, the last of which is the scratch slot, and at most `budget` tokens per
    forward pass. Raises BadLogprob when the weights give NaN or infinity, and Unavailable before
    the next pass once `is_abandoned` returns True.
    """
    results: list[list[float]] = [[] for _ in sequences]
    for pieces in _batches(sequences, free, budget):
        if is_abandoned():
            raise Unavailable("the scores are not needed any more")
        segments = [
            Segment.whole(
                piece.slot, piece.start, sequences[piece.at][piece.start : piece.end], adapter
            )
            for piece in pieces
        ]
        hidden = model.hidden_states(weights, cache, segments)
        rows = sum(len(segment.tokens) for segment in segments)
        if not bool(torch.isfinite(hidden[:rows]).all()):
            for piece in pieces:
                cache.wipe(piece.slot)
            raise BadLogprob(f"version {weights.version!r} gives no finite logprobs")
        row = 0
        values = _scores(model, weights, hidden, _targets(sequences, pieces), adapter)
        for piece in pieces:
            scored = sequences[piece.at][piece.start + 1 : piece.end + 1]
            results[piece.at] += values[row : row + len(scored)]
            row += piece.end - piece.start
    return results


def _targets(sequences: list[list[int]], pieces: list[_Piece]) -> list[int]:
    """Return the token to score in each row of a batch.

    The last row of a sequence predicts no token of it; its target is a placeholder.
    """
    targets: list[int] = []
    for piece in pieces:
        ids = sequences[piece.at]
        targets += ids[piece.start + 1 : piece.end + 1]
        targets += [0] * (piece.end == len(ids))
    return targets


def _scores(
    model: Model, weights: Weights, hidden: Tensor, targets: list[int], adapter: Adapter | None
) -> list[float]:
    """Return the logprob of each row's target token."""
    values: list[float] = []
    # A row of logits is as wide as the vocabulary, so the rows are scored in chunks, which may
    # span sequences.
    for start in range(0, len(targets), LOGIT_ROWS):
        chunk = targets[start : start + LOGIT_ROWS]
        values += model.scores(weights, hidden, start, chunk, adapter).tolist()
    return values


def _batches(sequences: list[list[int]], free: range, budget: int) -> Iterator[list[_Piece]]:
    """Yield pieces to compute together. A sequence beyond the budget is chunked, alone."""
    batch: list[_Piece] = []
    tokens = 0
    for at, token_ids in enumerate(sequences):
        length = len(token_ids)
        if length > budget:
            for start in range(0, length, budget):
                yield [_Piece(at, free[-1], start, min(start + budget, length))]
            continue
        if batch and (len(batch) == len(free) or tokens + length > budget):
            yield batch
            batch, tokens = [], 0
        batch.append(_Piece(at, free[len(batch)], 0, length))
        tokens += length
    if batch:
        yield batch
