"""Measuring on a noisy machine: CPU time of processes, taken in turns, medians of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used with all its threads, those that ended too, but without its
    children. By the kernel's clock of that process: ticks are too coarse for short rounds."""
    return time.clock_gettime((~pid << 3) | 2)


def tree(pid: int) -> list[int]:
    """A process and all that it started, as they are now."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            pids += tree(int(child))
    return pids


def rss(pid: int) -> int:
    """Resident memory of a process, in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_turns(
    contestants: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """The median of what each contestant returned, each called once a round in turn.

    A busy moment of the machine falls on all of them alike; the first rounds are not counted.
    """
    seen: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warm_up + rounds):
        for name, call in contestants.items():
            value = call()
            if turn >= warm_up:
                seen[name].append(value)
    return {name: median(values) for name, values in seen.items()}
