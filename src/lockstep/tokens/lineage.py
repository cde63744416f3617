"""What a branch of a session is, and how much a sample of it weighs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from lockstep.tokens.errors import BadRequest

if TYPE_CHECKING:
    from lockstep.tokens.sample import Sample

Kind = Literal["main", "subagent", "fork", "compaction", "retry", "auxiliary", "unknown"]
"""`compaction` is what goes on behind a summary, `auxiliary` a title, a summary or a memory call,
`retry` an attempt that the harness threw away, `unknown` a branch without evidence."""
KINDS: tuple[Kind, ...] = get_args(Kind)

Weights = Literal["session", "token"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)


def check_kinds(kinds: Iterable[str] | None) -> frozenset[Kind] | None:
    """The kinds of branches that are asked for, None for all. Raises BadRequest for others."""
    if kinds is None:
        return None
    named = [kinds] if isinstance(kinds, str) else list(kinds)
    for name in named:
        if name not in KINDS:
            raise BadRequest(f"kinds has {name!r}: expected {', '.join(KINDS)}", param="kinds")
    return frozenset(kind for kind in KINDS if kind in named)


def check_weights(weights: str | None) -> Weights | None:
    """How samples are weighted, None for alike. Raises BadRequest for what is no such way."""
    for known in WEIGHTS:
        if weights == known:
            return known
    if weights is None:
        return None
    raise BadRequest(f"weights is {weights!r}: expected {' or '.join(WEIGHTS)}", param="weights")


def weighted(samples: Sequence[Sample], weights: Weights | None) -> list[Sample]:
    """The samples of one session with their weights.

    They are for a loss that is the mean over the trainable tokens of each sample. With "session"
    they add up to 1, shared out by tokens: a session counts once, however many branches it has.
    With "token" a weight is the number of tokens: every token counts once, and a long session more
    than a short one. None leaves 1 for each: a session counts as often as it has branches.
    """
    if weights is None:
        return list(samples)
    counts = [sum(sample.sampled_mask) for sample in samples]
    whole = (sum(counts) or 1) if weights == "session" else 1
    return [
        replace(sample, weight=count / whole) for sample, count in zip(samples, counts, strict=True)
    ]
