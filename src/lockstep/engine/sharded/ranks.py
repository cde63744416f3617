"""The ranks of a trainer: small values that they exchange, with a limit on every wait."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.tokens.errors import CheckpointError

_exchanges = 0
"""Number of exchanges of this process: equal on all ranks, which take part in each of them."""


class Ranks:
    """The ranks of the default process group, or a single rank without one.

    Values go through the store by which the ranks found each other. Unlike a collective operation,
    it works with any backend and tells which rank is missing.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds` is the longest wait for other ranks."""
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._alone else dist.get_rank()
        self.count = 1 if self._alone else dist.get_world_size()
        self._seconds = seconds

    def exchange(self, task: str, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order. A value is anything that JSON holds.

        Every rank calls this with the same `task`. Raises CheckpointError that names the ranks
        which did not do the task within the limit.
        """
        if self._alone:
            return [value]
        global _exchanges
        number = _exchanges
        _exchanges += 1
        store = dist.distributed_c10d._get_default_store()
        keys = [_key(number, rank) for rank in range(self.count)]
        body = json.dumps([task, value])
        deadline = time.monotonic() + self._seconds
        try:
            store.set(keys[self.rank], body)
            left = max(deadline - time.monotonic(), 0.001)
            store.wait(keys, timedelta(seconds=left))
            bodies = [json.loads(store.get(key)) for key in keys]
            # All ranks have read the values of the exchange before this one.
            if number:
                store.delete_key(_key(number - 1, self.rank))
        except RuntimeError as error:
            missing = self._missing(store, keys)
            raise CheckpointError(
                f"{_named(missing, self.count)} not {task} within {self._seconds:g} s: is it still "
                f"running, and does every rank make this call? ({_first_line(error)})"
            ) from None
        for rank, (theirs, _) in enumerate(bodies):
            if theirs != task:
                raise CheckpointError(
                    f"rank {rank} of {self.count} has {theirs}, but rank {self.rank} has {task}: "
                    "every rank must make the same calls in the same order"
                )
        return [theirs for _, theirs in bodies]

    def _missing(self, store: Any, keys: Sequence[str]) -> list[int]:
        """Return the ranks without a value. Rank 0 itself holds the store in most launchers."""
        try:
            return [rank for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            return [0]


def _key(number: int, rank: int) -> str:
    return f"lockstep/{number}/{rank}"


def _named(ranks: Sequence[int], count: int) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return f"rank {listed} of {count} has" if len(ranks) == 1 else f"ranks {listed} of {count} have"


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
