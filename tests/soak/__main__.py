"""`make soak`: mixed load and weight updates on real processes; fails when anything grows.

python -m tests.soak --seconds 900
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from lockstep.progress import Progress
from lockstep.storage.key_file import KeyFile
from tests.fleet.live_fleet import Checkpoints
from tests.processes import TOKEN, ServeProcess
from tests.soak.gauges import Series, descriptors_of, memory_of, tasks_of, threads_of
from tests.soak.load import Load

CLIENTS = 6
WARM_UP = 1 / 3
"""Of the time: caches fill, and allocators keep what they were given once."""
UPDATE_SECONDS = 5.0


class Soak:
    """One run: a gateway with two workers, its load, and what is measured meanwhile."""

    def __init__(self, served: ServeProcess, keys: list[str], made: Checkpoints) -> None:
        self._served, self._keys, self._made = served, keys, made
        self._pids = {"gateway": served.process.pid}
        self._pids |= {f"worker {at}": one["pid"] for at, one in enumerate(served.workers)}
        self._series: dict[str, Series] = {}
        self.updates = 0

    async def run(self, seconds: float) -> bool:
        """Whether everything stayed flat and every request was answered as it should be."""
        admin_headers = {"authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(self._served.url) as data,
            aiohttp.ClientSession(self._served.admin_url, headers=admin_headers) as admin,
        ):
            load = Load(data, admin, self._keys)
            others = [
                asyncio.create_task(self._update(admin)),
                asyncio.create_task(self._measure(data, max(seconds / 90, 1.0))),
            ]
            with Progress(f"Soaking for {seconds:g} s"):
                await load.run(CLIENTS, seconds)
            for task in others:
                task.cancel()
            ended = await asyncio.gather(*others, return_exceptions=True)
        for result in ended:
            if not isinstance(result, asyncio.CancelledError):
                raise RuntimeError("measuring or updating ended") from (
                    result if isinstance(result, BaseException) else None
                )
        since = seconds * WARM_UP
        print(f"{sum(load.counts.values())} steps {dict(load.counts)}, {self.updates} updates")
        print(f"errors: {dict(load.errors) or 'none'}")
        print(f"after {since:.0f} s of warming up:")
        for series in self._series.values():
            print(series.line(since))
        return not load.errors and all(one.is_flat(since) for one in self._series.values())

    async def _update(self, admin: aiohttp.ClientSession) -> None:
        """New weights every few seconds, in turn."""
        while True:
            for name in "ab":  # those with a probe
                body = {
                    "weight_dir": str(self._made.paths[name]),
                    "version": f"{name}-{self.updates}",
                }
                async with admin.post("/v1/rl/update_weights", json=body) as response:
                    if response.status != 200:
                        raise RuntimeError(await response.text())
                self.updates += 1
                await asyncio.sleep(UPDATE_SECONDS)

    async def _measure(self, data: aiohttp.ClientSession, every: float) -> None:
        started, headers = time.monotonic(), {"authorization": f"Bearer {self._keys[0]}"}
        while True:
            await asyncio.sleep(every)
            at = time.monotonic() - started
            for name, pid in self._pids.items():
                bound = 8.0 if name == "gateway" else 24.0
                self._add(f"{name} memory", "MB", bound, at, memory_of(pid))
                self._add(f"{name} descriptors", "", 5, at, descriptors_of(pid))
                self._add(f"{name} threads", "", 3, at, threads_of(pid))
            self._add("gateway tasks", "", 5, at, await tasks_of(data, headers))

    def _add(self, name: str, unit: str, bound: float, at: float, value: float) -> None:
        self._series.setdefault(name, Series(name, unit, bound)).add(at, value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        keys = KeyFile(root / "keys.json")
        known = [keys.add(tenant)[1] for tenant in ("default", "alice", "bob")]
        made = Checkpoints.make(root / "checkpoints")
        served = ServeProcess(
            "--workers", "2", "--state-dir", str(root / "state"), "--key-file", str(keys.path),
            "--checkpoint-root", str(root),
            "--worker-args", "--max-model-len 512 --prefix-cache-mb 8",
        )  # fmt: skip
        try:
            flat = asyncio.run(Soak(served, known, made).run(seconds))
        finally:
            served.stop()
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
