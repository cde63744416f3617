"""Picks the worker of a key by rendezvous hashing, bounded by the load of the workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.tokens.errors import BadRequest

FIRST = np.uint64(0xFF51AFD7ED558CCD)
SECOND = np.uint64(0xC4CEB9FE1A85EC53)
HALF = np.uint64(32)


class Hashed(Protocol):
    """What the hash needs of a worker. `hash_index` is its own: -1 is outside of it."""

    in_flight: int
    elsewhere: int
    hash_index: int

    @property
    def id(self) -> str: ...


W = TypeVar("W", bound=Hashed)


class RendezvousHash(Generic[W]):
    """The workers that may get a request.

    A key belongs to the worker with the highest hash of both, so that one that joins or leaves
    moves only its own share of the keys. A worker whose load is above `load_factor` times the
    mean, plus one, is passed over for the next highest. Hashes are the same in every process:
    several gateways in front of one fleet agree.

    Picking is a handful of array operations: a loop in Python would cost a thousand workers 300 µs.
    """

    def __init__(self, load_factor: float = 1.25) -> None:
        if not load_factor >= 1:
            raise BadRequest(
                f"load_factor is {load_factor}: below 1 every worker could be over the bound",
                param="load_factor",
            )
        self._factor = load_factor
        self._workers: tuple[W, ...] = ()
        self.rebuild(())

    def __len__(self) -> int:
        return len(self._workers)

    def rebuild(self, workers: Sequence[W]) -> None:
        """Makes these the workers to pick from. Called when one comes or goes, not per request."""
        for gone in self._workers:
            gone.hash_index = -1
        self._workers = tuple(workers)
        for index, worker in enumerate(self._workers):
            worker.hash_index = index
        self._seeds = np.array([_digest(one.id.encode()) for one in workers], np.uint64)
        self._scores = np.empty_like(self._seeds)
        self._spare = np.empty_like(self._seeds)
        self.weigh()

    def weigh(self) -> None:
        """Reads the load of every worker anew: what others sent them has become known."""
        loads = [one.in_flight + one.elsewhere for one in self._workers]
        self._loads: npt.NDArray[np.int64] = np.array(loads, np.int64)
        self._total = sum(loads)

    def begin(self, worker: W) -> None:
        """Counts a request that goes to `worker`."""
        worker.in_flight += 1
        if worker.hash_index >= 0:
            self._loads[worker.hash_index] += 1
            self._total += 1

    def end(self, worker: W) -> None:
        """Counts the end of a request that `begin` counted."""
        worker.in_flight -= 1
        if worker.hash_index >= 0:
            self._loads[worker.hash_index] -= 1
            self._total -= 1

    def pick(self, key: bytes, without: Collection[W] = ()) -> W | None:
        """The worker for `key`, None when there is no other than those in `without`."""
        count = len(self._workers)
        if count == 0:
            return None
        if count == 1:
            (only,) = self._workers
            return None if only in without else only
        scores = self._hash(key)
        best = int(scores.argmax())
        bound = self._factor * self._total / count + 1
        if not without and self._loads.item(best) <= bound:
            return self._workers[best]
        allowed = self._loads <= bound
        left = np.ones(count, np.bool_)
        for one in without:
            if one.hash_index >= 0:
                left[one.hash_index] = False
        if not left.any():
            return None
        # When only workers above the bound are left, one of them is better than none.
        allowed = allowed & left if (allowed & left).any() else left
        return self._workers[int(np.where(allowed, scores, np.uint64(0)).argmax())]

    def _hash(self, key: bytes) -> npt.NDArray[np.uint64]:
        scores, spare = self._scores, self._spare
        np.bitwise_xor(self._seeds, np.uint64(_digest(key)), out=scores)
        np.multiply(scores, FIRST, out=scores)
        np.right_shift(scores, HALF, out=spare)
        np.bitwise_xor(scores, spare, out=scores)
        np.multiply(scores, SECOND, out=scores)
        return scores


def _digest(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
