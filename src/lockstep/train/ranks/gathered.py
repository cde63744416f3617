"""Whole tensors, gathered one at a time to one rank each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Rows = tuple[str, Tensor, tuple[int, ...]]
"""Name of a tensor, this rank's rows of it, and the shape of the whole. A scalar is whole."""


def gathered(tensors: Iterable[Rows]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole of every tensor that this rank is given: each rank gets every
    n-th, so that all of them have the same amount of work. All ranks iterate at the same time.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    for at, (name, rows, shape) in enumerate(tensors):
        owner = at % count
        if not shape:
            if rank == owner:
                yield name, rows
            continue
        # Ranks have as many rows as torch.chunk gives them: the last ones fewer, or none.
        padded = rows.new_zeros(-(-shape[0] // count), *shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in range(count)] if rank == owner else None
        dist.gather(padded, parts, dst=owner)
        if parts is not None:
            yield name, torch.cat(parts)[: shape[0]]


def merged(values: dict[str, T], group: Any) -> dict[str, T]:
    """Return the values of all ranks, whose names differ, on every rank."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values, group=group)
    return {name: value for part in parts for name, value in part.items()}
