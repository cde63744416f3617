"""The tree of token sequences by their shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

LEAST_SAVED = 3
"""Tokens that sharing a prefix must save. A run of tokens has a cost of its own in attention: it
copies the keys before it."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """Tokens [start, end) of sequence `example`, which follow those of node `parent`.

    `ends` are the sequences that end with this node.
    """

    parent: int | None
    example: int
    start: int
    end: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Branch:
    """Sequences order[first:last], whose first `depth` tokens are the path to node `parent`."""

    first: int
    last: int
    depth: int
    parent: int | None


def prefix_tree(sequences: Sequence[Sequence[int]], *, share: bool = True) -> list[PrefixNode]:
    """Return the nodes of the tree, parents before their children.

    Sequences are cut where they part, if that saves at least `LEAST_SAVED` tokens. Without `share`
    each sequence is a node. An empty sequence has none.
    """
    if not share:
        return [PrefixNode(None, at, 0, len(ids), (at,)) for at, ids in enumerate(sequences) if ids]
    order = in_tree_order(sequences)
    common = [0, *shared_lengths([sequences[at] for at in order])]
    nodes: list[PrefixNode] = []
    branches = [_Branch(0, len(order), 0, None)] if order else []
    while branches:
        own = branches.pop()
        example = order[own.first]
        parts = common[own.first + 1 : own.last]
        end = min(parts, default=len(sequences[example]))
        cuts = [own.first + 1 + at for at, length in enumerate(parts) if length == end]
        edges = [own.first, *cuts, own.last]
        saved = (len(edges) - 2) * (end - own.depth)
        is_leaf = len(edges) == 2
        parent, depth = own.parent, own.depth
        if end > own.depth and (is_leaf or saved >= LEAST_SAVED):
            ends = [at for at in order[own.first : own.last] if len(sequences[at]) == end]
            nodes.append(PrefixNode(parent, example, depth, end, tuple(ends)))
            parent, depth = len(nodes) - 1, end
        if is_leaf:
            continue
        children = [
            _Branch(first, last, depth, parent) for first, last in pairwise(edges)
            if last - first > 1 or len(sequences[order[first]]) > depth
        ]  # fmt: skip
        branches.extend(reversed(children))
    return nodes


def in_tree_order(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the sequences in an order in which relatives are neighbours."""
    return sorted(range(len(sequences)), key=lambda at: list(sequences[at]))


def shared_lengths(sequences: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield how many first tokens each sequence after the first has in common with the previous."""
    arrays = [np.asarray(ids, dtype=np.int64) for ids in sequences]
    for first, second in pairwise(arrays):
        length = min(len(first), len(second))
        parts = np.flatnonzero(first[:length] != second[:length])
        yield int(parts[0]) if len(parts) else length
