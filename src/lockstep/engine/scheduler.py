"""The scheduler: a priority queue, a list of running sequences, and a token budget per step."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from lockstep.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """`count` tokens of a sequence to compute in this step. `slot` is its index in `running`."""

    sequence: Sequence
    slot: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the step reaches the last token, so that the next one can be sampled."""
        return self.count == self.sequence.remaining


class Scheduler:
    """A queue of waiting sequences and a list of running ones.

    Running sequences occupy slots 0 to len(running) - 1 without gaps. When a sequence leaves, the
    last one takes its slot (`move` copies its keys and values), so that decoding always reads one
    dense range of slots.
    """

    def __init__(
        self, slots: int, max_batch_tokens: int, move: Callable[[int, int, int], None]
    ) -> None:
        self.slots = slots
        self.max_batch_tokens = max_batch_tokens
        self.running: list[Sequence] = []
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrivals = count()
        self._move = move

    @property
    def waiting(self) -> list[Sequence]:
        return [entry[-1] for entry in sorted(self._waiting, key=lambda entry: entry[:2])]

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, sequence: Sequence) -> None:
        entry = (sequence.request.priority, next(self._arrivals), sequence)
        heapq.heappush(self._waiting, entry)

    def next_ready(self, begun_only: bool = False) -> Sequence | None:
        """Pop the first waiting sequence that may run, or return None when no slot is free.

        With `begun_only`, sequences of requests that have not started stay queued.
        """
        if len(self.running) == self.slots:
            return None
        # Choices that wait for the first choice of their request go back under the same key, so
        # they keep their position in the queue.
        skipped: list[tuple[int, int, Sequence]] = []
        ready: Sequence | None = None
        while self._waiting and ready is None:
            entry = heapq.heappop(self._waiting)
            if entry[-1].ready and (entry[-1].begun or not begun_only):
                ready = entry[-1]
            else:
                skipped.append(entry)
        for entry in skipped:
            heapq.heappush(self._waiting, entry)
        return ready

    def start(self, sequence: Sequence) -> int:
        """Add a sequence to the running list; return its slot."""
        self.running.append(sequence)
        return len(self.running) - 1

    def plan(self) -> list[Work]:
        """Return the work of one step: all decoding sequences, then prefills up to the budget."""
        # Decoding sequences are scheduled first, so that a long prompt cannot stall them.
        budget = self.max_batch_tokens
        works = []
        prefills = []
        for slot, sequence in enumerate(self.running):
            if sequence.remaining == 1:
                works.append(Work(sequence, slot, 1))
                budget -= 1
            else:
                prefills.append((slot, sequence))
        for slot, sequence in prefills:
            chunk = min(sequence.remaining, budget)
            if chunk <= 0:
                break
            works.append(Work(sequence, slot, chunk))
            budget -= chunk
        return works

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence."""
        if sequence in self.running:
            slot = self.running.index(sequence)
            last = self.running.pop()
            if last is not sequence:
                self._move(len(self.running), slot, last.computed)
                self.running[slot] = last
            return
        self._waiting = [entry for entry in self._waiting if entry[-1] is not sequence]
        heapq.heapify(self._waiting)
