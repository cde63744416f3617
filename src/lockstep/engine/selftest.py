"""Does exact arithmetic hold on this CPU, for this model? Asked once, when an engine starts."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.engine.arithmetic import Arithmetic, Close, Exact
from lockstep.engine.block_shapes import attention_shapes, row_multiple
from lockstep.engine.cache import SlotCache
from lockstep.engine.config import EngineOptions, ModelConfig
from lockstep.engine.model import Model, Segment
from lockstep.engine.weights import Weights

LENGTH = 150
"""Long enough to cross two chunks of keys."""
CUTS = ((150,), (7, 16, 40, 87), (64, 64, 14, *[1] * 8), (142, *[1] * 8))


def fitting(config: ModelConfig, options: EngineOptions, max_len: int) -> tuple[Arithmetic, str]:
    """The arithmetic that was asked for where device and type know it, and why not where not."""
    if options.arithmetic == "close":
        return Close(), "close was asked for"
    if options.device != "cpu" or options.dtype != "float32":
        return Close(), f"exact needs fp32 on a CPU, not {options.dtype} on {options.device}"
    return Exact(config.head_dim, max_len), ""


def unproved(model: Model, weights: Weights, cache: SlotCache) -> str | None:
    """Why exact arithmetic does not hold for this model here; None where it does.

    Sets the multiple in which its rows come.
    """
    if not isinstance(model.arithmetic, Exact):
        return None
    if not attention_shapes(model.config.head_dim).tails:
        return "the attention of a few queries has other bits than that of many"
    rows = row_multiple(model.config.products)
    if not rows:
        return "a row of a matrix product has other bits in another number of rows"
    model.rows = rows
    return self_test(model, weights, cache)


def self_test(model: Model, weights: Weights, cache: SlotCache) -> str | None:
    """None when a sequence gives the same bits however it is cut and batched, else what differs."""
    length = min(LENGTH, model.max_len - 1)
    vocab = model.config.vocab_size
    ids = [(i * 2654435761 + 12345) % vocab for i in range(length)]
    alone: Tensor | None = None
    for cut in CUTS:
        for companions in (0, min(2, cache.slots - 1)):
            with torch.inference_mode():
                logits = _run(model, weights, cache, ids, cut, companions)
            alone = logits if alone is None else alone
            if not torch.equal(alone, logits):
                worst = float((alone - logits).abs().max())
                return (
                    f"logits differ by up to {worst:.1e} between one pass of {length} tokens and "
                    f"passes of {cut[:4]} with {companions} companions"
                )
    return None


def _run(
    model: Model, weights: Weights, cache: SlotCache, ids: list[int], cut: tuple[int, ...],
    companions: int,
) -> Tensor:  # fmt: skip
    """The logits of the last 8 positions, computed in pieces of `cut` beside other sequences."""
    parts, at = [], 0
    for size in cut:
        tokens = ids[at : at + size]
        if not tokens:
            break
        segments = [Segment.whole(0, at, tokens)]
        segments += [Segment.whole(slot, at, tokens[::-1]) for slot in range(1, companions + 1)]
        hidden = model.forward(weights, cache, model.batch(segments))
        parts.append(model.logits(weights, hidden, range(len(tokens))))
        at += size
    return torch.cat(parts)[-8:]
