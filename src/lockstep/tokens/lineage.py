"""Kinds of branches of a session, and the weights of their samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.tokens.errors import BadRequest

if TYPE_CHECKING:
    from lockstep.tokens.sample import Sample

Kind = Literal["main", "subagent", "fork", "compaction", "retry", "auxiliary", "unknown"]
"""Kind of a branch: `compaction` continues after a summary, `auxiliary` is a title, summary or
memory call, `retry` a discarded attempt, `unknown` a branch without evidence.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)

Weights = Literal["session", "token"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)


def check_kinds(kinds: Iterable[str] | None) -> frozenset[Kind] | None:
    """Return the requested kinds of branches, None for all. Raises BadRequest for unknown ones."""
    if kinds is None:
        return None
    named = [kinds] if isinstance(kinds, str) else list(kinds)
    for name in named:
        if name not in KINDS:
            raise BadRequest(f"kinds has {name!r}: expected {', '.join(KINDS)}", param="kinds")
    return frozenset(kind for kind in KINDS if kind in named)


def check_weights(weights: str | None) -> Weights | None:
    """Return how samples are weighted, None for equally. Raises BadRequest for an unknown way."""
    for names in WEIGHTS:
        if weights == names:
            return names
    if weights is None:
        return None
    raise BadRequest(f"weights is {weights!r}: expected {' or '.join(WEIGHTS)}", param="weights")


def weighted(samples: Sequence[Sample], weights: Weights | None) -> list[Sample]:
    """Return the samples of one session with their weights.

    The weights are for a loss that averages over the trainable tokens of each sample. With
    "session" they sum to 1 in proportion to the tokens: a session counts once, however many
    branches it has. With "token" a weight is the number of tokens: every token counts once, and a
    long session more than a short one. None keeps 1: a session counts once per branch.
    """
    if weights is None:
        return list(samples)
    counts = [sum(sample.sampled_mask) for sample in samples]
    whole = (sum(counts) or 1) if weights == "session" else 1
    return [
        replace(sample, weight=count / whole) for sample, count in zip(samples, counts, strict=True)
    ]
