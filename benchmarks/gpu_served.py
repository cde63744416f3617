"""A model on a GPU as its users meet it: gateway and worker as processes, requests over HTTP.

Part of `benchmarks/gpu.py`, which runs it with `--served`. Every figure is of whole answers, from
the first request sent to the last answer read, and of streams while weights are replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

PROMPT = TOKENS = 256
ROUNDS = 5
STREAMS = 32
MODEL_LEN = 1024
WORKER = (
    "--device cuda --dtype bfloat16 --arithmetic {arithmetic} --max-model-len {length} "
    "--max-num-seqs 256 --max-num-batched-tokens 4096 --kv-cache-mb 40000 --prefix-cache-mb 1024"
)


@contextlib.contextmanager
def gateway(
    directory: Path, source: Path, log: Path, arithmetic: str = "auto", worker: str = ""
) -> Iterator[dict[str, Any]]:
    """A gateway with one worker, on the GPU unless `worker` has other options: the fields of its
    ready line, and when that came."""
    command = [sys.executable, "-m", "lockstep", "serve", str(directory), "--json"]
    command += ["--port", "0", "--admin-port", "0", "--checkpoint-root", str(directory.parent)]
    command += ["--state-dir", str(directory.parent / "state"), "--worker-args"]
    command.append(worker or WORKER.format(arithmetic=arithmetic, length=MODEL_LEN))
    paths = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    begun = time.perf_counter()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        try:
            for line in process.stdout or ():
                with contextlib.suppress(ValueError):
                    ready = json.loads(line)
                    if ready.get("event") == "ready":
                        spent = {"start_seconds": time.perf_counter() - begun}
                        yield ready | spent | {"pid": process.pid}
                        return
            raise RuntimeError(f"the gateway did not start: {log.read_text()[-2000:]}")
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def prompts(count: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(151_000) for _ in range(PROMPT)] for _ in range(count)]


def cpu_seconds(pid: int) -> tuple[float, float]:
    """What a gateway and its worker have used of their CPUs so far."""
    ticks = os.sysconf("SC_CLK_TCK")
    used = {pid: 0.0}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if (number := int(stat.parent.name)) == pid or int(fields[1]) == pid:
                used[number] = (int(fields[11]) + int(fields[12])) / ticks
    return used.pop(pid), sum(used.values())


async def answers(policy: Any, count: int, rng: random.Random, **options: Any) -> float:
    """Tokens per second of so many requests at once."""
    requests = prompts(count, rng)
    begun = time.perf_counter()
    settings = {"max_tokens": TOKENS, "ignore_eos": True} | options
    results = await asyncio.gather(*(policy.generate(ids, **settings) for ids in requests))
    spent = time.perf_counter() - begun
    return sum(len(each.token_ids) for (each,) in results) / spent


class Streams:
    """So many streams that never end: when each of their events came."""

    def __init__(self, policy: Any, count: int, rng: random.Random) -> None:
        self.times: list[list[float]] = [[] for _ in range(count)]
        self._policy, self._rng = policy, rng
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Streams:
        self._tasks = [asyncio.ensure_future(self._run(times)) for times in self.times]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, times: list[float]) -> None:
        while True:
            (ids,) = prompts(1, self._rng)
            # Up to the model's limit: the fewer begin anew, the less that hides a silence.
            tokens = MODEL_LEN - PROMPT - 8
            async for _ in self._policy.stream(ids, max_tokens=tokens, ignore_eos=True):
                times.append(time.perf_counter())

    def rate(self, begin: float, end: float) -> float:
        """Events per second between two moments."""
        count = sum(begin <= at < end for times in self.times for at in times)
        return count / (end - begin)

    def silence(self, begin: float, end: float) -> float:
        """The longest time between two events of one stream, of those that meet that span."""
        return max(
            b - a for times in self.times for a, b in pairwise(times) if b >= begin and a <= end
        )


@contextlib.asynccontextmanager
async def connected(ready: dict[str, Any]) -> AsyncIterator[tuple[Any, Any]]:
    """A policy and the fleet of a gateway."""
    import lockstep

    opened = lockstep.connect_fleet(ready["admin_url"], token_file=ready["admin_token_file"])
    async with lockstep.connect(ready["url"]) as policy, opened as fleet:
        yield policy, fleet


async def measure(ready: dict[str, Any], batches: list[int], pair: list[Path]) -> None:
    """Prints the figures of whole answers, of options, and of updates under streams."""
    rng = random.Random(0)
    print(
        f"ready after {ready['start_seconds']:.1f} s\n\n| requests at once | tokens/s | CPU of "
        "gateway, worker and client, us a token |\n|---|---|---|"
    )
    async with connected(ready) as (policy, fleet):
        for count in batches:
            before = (*cpu_seconds(ready["pid"]), time.process_time())
            rates = [await answers(policy, count, rng) for _ in range(ROUNDS)]
            after = (*cpu_seconds(ready["pid"]), time.process_time())
            share = 1e6 / (ROUNDS * count * TOKENS)
            costs = ", ".join(f"{share * (b - a):.1f}" for a, b in zip(before, after, strict=True))
            each = ", ".join(f"{rate:,.0f}" for rate in rates)
            print(f"| {count} | {median(rates):,.0f} (of {each}) | {costs} |", flush=True)
        for options in ({"logprobs": 1}, {"logprobs": 20}, {"top_p": 0.95}, {"top_k": 20}):
            rates = [await answers(policy, STREAMS, rng, **options) for _ in range(2)]
            print(f"| {STREAMS} with {options} | {max(rates):,.0f} | |", flush=True)
        print("\n| update | whole s | stage s | pause ms (to pause, commit, resume) | longest "
              "silence ms | events/s before, meanwhile |\n|---|---|---|---|---|---|")  # fmt: skip
        async with Streams(policy, STREAMS, rng) as streams:
            await asyncio.sleep(2)
            for number in range(4):
                begun = time.perf_counter()
                await asyncio.sleep(1.5)
                staged = time.perf_counter()
                operation = await fleet.update_weights(str(pair[number % 2]), version=f"u{number}")
                ended = time.perf_counter()
                await asyncio.sleep(1.0)
                pause = operation.pause_seconds or 0.0
                (worker,) = operation.workers.values()
                parts = [worker.seconds.get(name, 0) for name in ("quiesce", "commit", "resume")]
                cells = [
                    f"{number + 1}",
                    f"{ended - staged:.2f}",
                    f"{worker.seconds.get('stage', 0):.2f}",
                    f"{1e3 * pause:.1f} ({', '.join(f'{1e3 * part:.1f}' for part in parts)})",
                    f"{1e3 * streams.silence(staged, ended + 0.9):.0f}",
                    f"{streams.rate(begun, staged):,.0f}, {streams.rate(staged, ended):,.0f}",
                ]
                print("| " + " | ".join(cells) + " |", flush=True)


def run(model: Any, source: Path, batches: list[int], arithmetic: str) -> None:
    """Serves `model`, updates it to another and back, and prints what clients saw."""
    import torch

    from lockstep.engine.probe import remember, save_checkpoint

    with tempfile.TemporaryDirectory() as root:
        served = Path(root) / "served"
        model.save_pretrained(served)
        remember(model)
        pair = []
        for name in "ab":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.02 if name == "a" else 1 / 1.02)
            begun = time.perf_counter()
            model.save_pretrained(Path(root) / f"plain-{name}")
            plain = time.perf_counter() - begun
            begun = time.perf_counter()
            pair.append(save_checkpoint(model, Path(root) / name, version=name))
            whole = time.perf_counter() - begun
            print(f"save_checkpoint with probe {whole:.2f} s, save_pretrained alone {plain:.2f} s")
        with gateway(served, source, Path(root) / "log", arithmetic) as ready:
            asyncio.run(measure(ready, batches, pair))
