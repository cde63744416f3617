"""The token sequences of one forward pass: the samples, or samples with another context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.explain.case import Case, Group, Ints
from lockstep.explain.setting import Context, Rows
from lockstep.tokens import Sample


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """One sequence to compute, and what is read from it.

    For each of `places` (indices of compared tokens), the logits after the token at `rows` predict
    the token `tokens`. `shift` is how far positions moved against the sample; `start` is where
    positions start, if not at 0.
    """

    sample: int
    ids: list[int]
    places: Ints
    rows: Ints
    tokens: Ints
    shift: int = 0
    restart: bool = False


def sequences(
    case: Case, context: Context | None, rows: Rows, pad: int, only: Sequence[int] | None = None
) -> list[ScoredSequence]:
    """Return the sequences of a case, of some samples only if `only` is given."""
    if context is not None and context.kind == "replace":
        return _replaced(case, context)
    by_sample: dict[int, list[Group]] = {}
    for group in case.groups:
        by_sample.setdefault(group.sample, []).append(group)
    longest = max(len(sample.token_ids) for sample in case.samples)
    built = []
    previous: list[int] = []
    for index, groups in by_sample.items():
        sample = case.samples[index]
        front, dropped = _front(sample, groups[0], context, longest, pad, previous)
        previous = sample.token_ids
        if only is not None and index not in only:
            continue
        places = np.concatenate([np.arange(g.first, g.places.stop) for g in groups])
        at = [_read_at(group, rows) for group in groups]
        read = np.concatenate([row for row, _ in at])
        token = np.concatenate([token for _, token in at])
        shift = len(front) - dropped
        keep = (read + shift >= 0) & (read < len(sample.token_ids)) & (token >= 1)
        keep &= token < len(sample.token_ids)
        built.append(
            ScoredSequence(
                index,
                [*front, *sample.token_ids[dropped:]],
                places[keep],
                read[keep] + shift,
                np.asarray(sample.token_ids, dtype=np.int64)[token[keep]],
                shift,
                context is not None and context.restart,
            )
        )
    return built


def _read_at(group: Group, rows: Rows) -> tuple[Ints, Ints]:
    """Return the rows of logits and the positions of tokens that are read for a group."""
    own = np.arange(group.start, group.end)
    if rows == "after":
        return own, own
    if rows == "before":
        return own - 2, own
    if rows == "prompt start":
        own = own - group.start + 1
    elif rows == "prompt end":
        own = own - (group.end - group.start)
    return own - 1, own


def _front(
    sample: Sample, first: Group, context: Context | None, longest: int, pad: int,
    previous: list[int],
) -> tuple[list[int], int]:  # fmt: skip
    """Return the tokens to put in front of a sample, and how many of its own are dropped."""
    if context is None:
        return [], 0
    if context.kind == "insert":
        return list(context.ids), 0
    if context.kind == "drop":
        return [], min(context.count, first.start - 1)
    if context.kind == "pad":
        return [pad] * (longest - len(sample.token_ids)), 0
    if context.kind == "packed":
        return list(previous), 0
    return [], max(0, first.start - context.count)


def _replaced(case: Case, context: Context) -> list[ScoredSequence]:
    """Return a sequence for each turn, because each has its own history."""
    histories = {(sample, turn): ids for sample, turn, ids in context.turns}
    built = []
    for group in case.groups:
        sample = case.samples[group.sample]
        # A turn under two versions is two groups: the second follows the first.
        begin = min(
            g.start for g in case.groups if (g.sample, g.turn) == (group.sample, group.turn)
        )
        history = histories.get((group.sample, group.turn), tuple(sample.token_ids[:begin]))
        if not history:
            continue
        ids = [*history, *sample.token_ids[begin : group.end]]
        own = np.arange(group.start, group.end) - begin + len(history)
        built.append(
            ScoredSequence(
                group.sample, ids, np.arange(group.first, group.places.stop), own - 1,
                np.asarray(ids, dtype=np.int64)[own], len(history) - begin,
            )
        )  # fmt: skip
    return built
