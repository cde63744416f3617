"""What must not grow: memory, descriptors, threads and tasks of processes, and their slopes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

MEGABYTE = 1 << 20


def memory_of(pid: int) -> float:
    """Megabytes that the process itself holds, shared libraries not counted."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"Private_(?:Clean|Dirty):\s+(\d+)", text)) / 1024


def descriptors_of(pid: int) -> float:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads_of(pid: int) -> float:
    return len(os.listdir(f"/proc/{pid}/task"))


async def tasks_of(http: aiohttp.ClientSession, headers: dict[str, str]) -> float:
    """Tasks on the event loop of a gateway."""
    async with http.get("/metrics", headers=headers) as response:
        text = await response.text()
    (number,) = re.findall(r"(?m)^lockstep_gateway_tasks (\S+)", text)
    return float(number)


@dataclass
class Series:
    """Values over time (seconds), and how much more of it there may be at the end."""

    name: str
    unit: str
    bound: float
    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.points.append((at, value))

    def slope(self, since: float) -> float:
        """By least squares, per minute, of the points from `since` on."""
        points = [(at / 60, value) for at, value in self.points if at >= since]
        mean_at = sum(at for at, _ in points) / len(points)
        mean = sum(value for _, value in points) / len(points)
        spread = sum((at - mean_at) ** 2 for at, _ in points)
        rises = sum((at - mean_at) * (value - mean) for at, value in points)
        return rises / spread if spread else 0.0

    def growth(self, since: float) -> float:
        """What the slope adds up to over those points."""
        return self.slope(since) * (self.points[-1][0] - since) / 60

    def line(self, since: float) -> str:
        later = [value for at, value in self.points if at >= since]
        verdict = "ok" if self.is_flat(since) else f"GROWS: more than {self.bound:g} {self.unit}"
        return (
            f"{self.name:<26} {later[0]:8.1f} -> {later[-1]:8.1f} {self.unit:<4} "
            f"{self.slope(since):+8.3f} a minute  {verdict}"
        )

    def is_flat(self, since: float) -> bool:
        return self.growth(since) <= self.bound
