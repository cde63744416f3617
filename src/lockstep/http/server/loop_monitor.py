"""Measurement of how long the event loop of a process is blocked: meanwhile no request is
served.
"""

from __future__ import annotations

import asyncio
from time import thread_time

from prometheus_client import CollectorRegistry, Histogram

TICK = 0.025
BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class LoopMonitor:
    """Task that wakes up every 25 ms and records how late it was.

    The clock "wall" records the delay, whatever its cause; "cpu" the time that the loop's own
    thread computed since the last wake-up, which does not depend on other load of the machine. No
    callback computes for longer than that.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        delay = Histogram(
            "lockstep_event_loop_delay_seconds",
            "How late the event loop was (clock wall), and how long it computed meanwhile (cpu).",
            ["clock"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._wall, self._cpu = delay.labels("wall"), delay.labels("cpu")
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> LoopMonitor:
        self._loop = asyncio.get_running_loop()
        self._wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._computed = thread_time()
        self._due = self._loop.time() + TICK
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self._wall.observe(max(self._loop.time() - self._due, 0.0))
        self._cpu.observe(thread_time() - self._computed)
        self._wait()
