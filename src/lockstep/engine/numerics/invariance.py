"""Start-up proof that a sequence has the same bits in any chunks and any batch."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.cache import SlotCache
from lockstep.engine.model.arithmetic import (
    CLOSE_ROW_MULTIPLE,
    Arithmetic,
    Close,
    Exact,
    ExactOnDevice,
)
from lockstep.engine.model.model import Model, Segment
from lockstep.engine.numerics.block_shapes import row_multiple, steady_products, threads, why_unfit
from lockstep.engine.numerics.plan import warn_of_fallback, why_not_portable
from lockstep.engine.numerics.trainer_path import trainer_logits
from lockstep.engine.options import EngineOptions
from lockstep.engine.weights.weights import Weights
from lockstep.tokens.errors import EngineFailure
from lockstep.tokens.numerics import ArithmeticName

log = logging.getLogger(__name__)

LENGTH = 150
"""Length of the tested sequence: it spans more than two chunks of keys."""
CUTS = ((150,), (7, 16, 40, 87), (64, 64, 14, *[1] * 8), (142, *[1] * 8))


def requested_arithmetic(
    config: ModelConfig, options: EngineOptions, max_len: int
) -> tuple[Arithmetic, str]:
    """Return the requested arithmetic, or Close and the reason when device or dtype rule it out."""
    if options.arithmetic == "close":
        return Close(), "close was requested"
    if problem := options.why_not_exact:
        return Close(), f"exact needs {problem}"
    if options.device != "cpu":
        if find_spec("triton") is None:
            return Close(), "exact on a GPU needs Triton"
        return ExactOnDevice(), ""  # `lockstep.engine.cuda.start` proves it once kernels compiled
    name: ArithmeticName = "portable" if options.arithmetic == "portable" else "exact"
    return Exact(config.head_dim, max_len, name), ""


def prove(model: Model, weights: Weights, cache: SlotCache, options: EngineOptions) -> str:
    """Keep the model's arithmetic if it is proved, else fall back to a weaker one.

    Returns the reason for a fallback, or an empty string. Raises EngineFailure when exact or
    portable arithmetic was requested and does not hold.
    """
    if problem := why_not_exact(model, weights, cache):
        if options.arithmetic in ("exact", "portable"):
            raise EngineFailure(f"exact arithmetic does not hold on this CPU: {problem}")
        warn_of_fallback(problem)
        model.arithmetic, model.row_multiple = Close(), CLOSE_ROW_MULTIPLE
        return f"the self-test failed: {problem}"
    if options.arithmetic == "portable" and (problem := why_not_portable()):
        log.warning("exact on this make of CPU only: %s", problem)
        model.arithmetic.name = "exact"
        return f"not portable here: {problem}"
    return ""


def why_not_exact(model: Model, weights: Weights, cache: SlotCache) -> str | None:
    """Return why exact arithmetic does not hold for this model, or None if it does.

    Sets the row multiple of the model.
    """
    if not isinstance(model.arithmetic, Exact):
        return None
    if problem := why_unfit(model.config.head_dim, model.config.products):
        return problem
    model.row_multiple = row_multiple(model.config.products)
    with steady_products(model.config.products):
        return why_batch_dependent(model, weights, cache) or why_unlike_trainer(
            model, weights, cache
        )


def why_batch_dependent(model: Model, weights: Weights, cache: SlotCache) -> str | None:
    """Return how the bits of a sequence depend on its chunks or its batch, or None."""
    ids = _ids(model)
    # The first result, one pass without companions, is what all others must equal.
    alone: Tensor | None = None
    for cut in CUTS:
        for companions in (0, min(2, cache.slots - 1)):
            with torch.inference_mode():
                logits = _run(model, weights, cache, ids, cut, companions)
            alone = logits if alone is None else alone
            if not torch.equal(alone, logits):
                worst = float((alone - logits).abs().max())
                return (
                    f"logits differ by up to {worst:.1e} between one pass of {len(ids)} tokens and "
                    f"passes of {cut[:4]} with {companions} companions"
                )
    return None


def why_unlike_trainer(model: Model, weights: Weights, cache: SlotCache) -> str | None:
    """Return how the bits of a trainer's forward pass differ from the engine's, or None.

    A trainer computes projections separately, whole sequences in a batch, in several threads and
    with autograd. The pass repeats that of transformers without its import, which takes seconds.
    `lockstep.engine.numerics.selftest` tests the module itself.
    """
    ids = _ids(model)
    with torch.inference_mode():
        engine = _run(model, weights, cache, ids, (len(ids),), 0)
    for autograd in (False, True):
        for team in (1, 2):
            with torch.set_grad_enabled(autograd), threads(team):
                batch = trainer_logits(model, weights, [ids[::-1], ids])
            logits = batch[1, : len(ids)][-8:].detach()
            if not torch.equal(engine, logits):
                worst = float((engine - logits).abs().max())
                return (
                    f"logits differ by up to {worst:.1e} between engine and trainer, with "
                    f"{team} threads and autograd {'on' if autograd else 'off'}"
                )
    return None


def _ids(model: Model) -> list[int]:
    length, vocab = min(LENGTH, model.max_len - 1), model.config.vocab_size
    return [(i * 2654435761 + 12345) % vocab for i in range(length)]


def _run(
    model: Model, weights: Weights, cache: SlotCache, ids: list[int], cut: tuple[int, ...],
    companions: int,
) -> Tensor:  # fmt: skip
    """Return the last 8 rows of logits, computed in chunks of `cut` beside other sequences."""
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
