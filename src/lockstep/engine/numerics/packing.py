"""Packing of sequences into one row without padding, with shared prefixes computed once.

A token's result depends only on the tokens before it, and its bits do not depend on the rest of the
row. The sequences are therefore packed as a tree (see `prefix_tree`): a prompt with eight responses
is computed once, and so is what the branches of a session have in common. Each run of tokens
attends to the runs before it in the tree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.engine.numerics.prefix_tree import prefix_tree
from lockstep.engine.numerics.segments import attend

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """A run of consecutive tokens, with its keys: those of the shared prefix, then its own."""

    shared: Ints
    own: Ints


@dataclass(frozen=True, slots=True)
class PackedRuns:
    """Runs of similar size: indices of queries (S, Q) and keys (S, K), and positions (S, Q)."""

    queries_SQ: Tensor
    keys_SK: Tensor
    positions_SQ: Tensor

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = 0
    ) -> Tensor:
        """Return the attention of the runs, (S * Q, heads, dim), of inputs (T, heads, dim)."""
        q, k, v = (
            part.index_select(0, at.flatten()).view(*at.shape, *part.shape[1:]).transpose(1, 2)
            for part, at in ((query, self.queries_SQ), (key, self.keys_SK), (value, self.keys_SK))
        )
        return attend(q, k, v, self.positions_SQ, scale, window).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of tokens. `tokens_of[i]` holds the indices of sequence i in it."""

    ids_T: Tensor
    positions_T: Tensor
    tokens_of: tuple[Ints, ...]
    runs: tuple[PackedRuns, ...]
    place_T: Tensor
    """Index of each token of the row in the concatenated output of the runs."""

    def arguments(self) -> dict[str, Tensor | PackedRow | bool]:
        """Return the arguments to call a prepared model with (see `exact.prepare`)."""
        return {
            "input_ids": self.ids_T[None],
            "position_ids": self.positions_T[None],
            # Transformers uses a mask of four dimensions as it is, and does not build one.
            "attention_mask": torch.zeros(1, 1, 1, 1),
            "use_cache": False,
            "packed_row": self,
        }

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = 0
    ) -> Tensor:
        """Return the attention (1, T, heads, dim) of query (1, heads, T, dim)."""
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        out = torch.cat([runs.attend(q, k, v, scale, window) for runs in self.runs])
        return out.index_select(0, self.place_T)[None]


def pack(sequences: Sequence[Sequence[int]], *, share: bool = True, multiple: int = 1) -> PackedRow:
    """Pack sequences into one row.

    Equal beginnings of sequences are computed once, unless `share` is false. The row is padded at
    its end to a multiple of `multiple`, so that no product has to pad it again.
    """
    tokens: list[int] = []
    positions: list[int] = []
    nothing = np.zeros(0, dtype=np.int64)
    tokens_of = [nothing] * len(sequences)
    runs: list[TokenRun] = []

    def add(ids: Sequence[int], after: Ints) -> Ints:
        own = np.arange(len(tokens), len(tokens) + len(ids))
        tokens.extend(ids)
        positions.extend(range(len(after), len(after) + len(ids)))
        runs.append(TokenRun(after, own))
        return own

    paths: list[Ints] = []
    for node in prefix_tree(sequences, share=share):
        before = nothing if node.parent is None else paths[node.parent]
        own = add(sequences[node.example][node.start : node.end], before)
        paths.append(np.concatenate((before, own)))
        for at in node.ends:
            tokens_of[at] = paths[-1]
    if missing := -len(tokens) % multiple:
        add([0] * missing, nothing)
    packed, place = _group_runs(runs, len(tokens))
    return PackedRow(
        torch.tensor(tokens), torch.tensor(positions), tuple(tokens_of), packed, place
    )  # fmt: skip


def _group_runs(runs: Sequence[TokenRun], count: int) -> tuple[tuple[PackedRuns, ...], Tensor]:
    """Return the runs grouped by size, and `place_T`.

    Grouping keeps short runs from being padded to the longest.
    """
    by_size: dict[tuple[int, int], list[TokenRun]] = defaultdict(list)
    for run in runs:
        keys = len(run.shared) + len(run.own)
        # Runs of one group differ by less than a factor of two, which bounds the padding.
        by_size[len(run.own).bit_length(), keys.bit_length()].append(run)
    place = np.zeros(count, dtype=np.int64)
    packed: list[PackedRuns] = []
    start = 0
    for alike in by_size.values():
        queries = max(len(run.own) for run in alike)
        keys = max(len(run.shared) + len(run.own) for run in alike)
        queries_SQ, positions_SQ = np.zeros((2, len(alike), queries), dtype=np.int64)
        keys_SK = np.zeros((len(alike), keys), dtype=np.int64)
        for row, run in enumerate(alike):
            own, before = len(run.own), len(run.shared)
            queries_SQ[row, :own] = run.own
            positions_SQ[row, :own] = np.arange(before, before + own)
            keys_SK[row, :before], keys_SK[row, before : before + own] = run.shared, run.own
            place[run.own] = start + row * queries + np.arange(own)
        packed.append(PackedRuns(*map(torch.from_numpy, (queries_SQ, keys_SK, positions_SQ))))
        start += queries_SQ.size
    return tuple(packed), torch.from_numpy(place)
