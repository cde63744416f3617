"""Files of a trainer's state besides the weights, written by one rank or by each of several.

Rank 0 writes `step-N.pt`, the others `step-N.rank-R.pt`. A tensor that the ranks share out is cut
along its first dimension as torch.chunk does, so that any number of ranks can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from lockstep.checkpoint.files import sync

SHARED = ("optimizer", "reference")
"""Entries of a state whose tensors the ranks share out. The others are rank 0's."""
RANKS = "ranks"
"""Entry of rank 0's file: how many ranks wrote the state."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one of `count` ranks."""

    rank: int
    count: int

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor. Scalars are not shared out."""
        if self.count == 1 or not whole.dim():
            return whole
        chunks = whole.chunk(self.count)
        return chunks[self.rank].clone() if self.rank < len(chunks) else whole[:0].clone()


WHOLE = Share(0, 1)


def write_state(states: Path, step: int, state: dict[str, Any], share: Share) -> None:
    """Write one rank's part of the state of a step. Raises OSError when the disk is full."""
    if share.rank:
        state = {name: state[name] for name in SHARED}
    elif share.count > 1:
        state = {**state, RANKS: share.count}
    path = _file(states, step, share.rank)
    scratch = path.with_name(f".{path.stem}.tmp")
    try:
        with open(scratch, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        # torch's writer replaces the error of the disk by its own.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    sync(scratch.replace(path))
    sync(states)


def read_state(states: Path, step: int, share: Share) -> dict[str, Any]:
    """Return this rank's part of the state. It may be mapped memory of the files."""
    first = _load(_file(states, step, 0), mapped=share.count > 1)
    count = first.pop(RANKS, 1)
    if count == share.count == 1:
        return first
    parts = [first, *(_load(_file(states, step, rank)) for rank in range(1, count))]
    return first | {
        name: _map([own[name] for own in parts], lambda own: share.of(_join(own)))
        for name in SHARED
    }


def is_whole(states: Path, step: int) -> bool:
    """Whether the files of all ranks exist and pass their checksums."""
    path = _file(states, step, 0)
    if not _is_sound(path):
        return False
    count = _load(path).get(RANKS, 1)
    return all(_is_sound(_file(states, step, rank)) for rank in range(1, count))


def remove_state(states: Path, step: int) -> None:
    for path in (_file(states, step, 0), *states.glob(f"step-{step}.rank-*.pt")):
        path.unlink(missing_ok=True)


def _file(states: Path, step: int, rank: int) -> Path:
    return states / (f"step-{step}.rank-{rank}.pt" if rank else f"step-{step}.pt")


def _load(path: Path, *, mapped: bool = True) -> dict[str, Any]:
    # Mapped, a rank reads only the rows that it needs of what the others wrote.
    state: dict[str, Any] = torch.load(path, weights_only=True, mmap=mapped)
    return state


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if not parts[0].dim() else torch.cat(list(parts))


def _map(parts: Sequence[Any], work: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """Apply `work` to the tensors at each place of nested values that have one structure."""
    first = parts[0]
    if isinstance(first, Tensor):
        return work(parts)
    if isinstance(first, dict):
        return {key: _map([own[key] for own in parts], work) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_map(own, work) for own in zip(*parts, strict=True))
    return first


def _is_sound(path: Path) -> bool:
    try:
        with ZipFile(path) as entries:
            return entries.testzip() is None
    except (OSError, BadZipFile):
        return False
