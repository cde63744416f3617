"""What the client costs beside renderers.client.generate 0.1.12: same answers, same run.

Both talk HTTP to one server in another process; what is measured is CPU time of this process.
The peer gets a renderer that parses nothing, so only its transport and checks are counted.

    python -m benchmarks.client [--repeats N]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any

from benchmarks.canned import LONG_PROMPT, PROMPT, bodies, served
from lockstep.backends import Ask, open_transport

Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Section:
    """One comparison: the bodies each side gets, and the ratio to reach, if one was set."""

    title: str
    ours: str
    peers: str
    target: float | None
    prompt: int = PROMPT


SECTIONS = (
    Section("8,192-token answer, each as it asks a Lockstep server", "flat", "tokens", 1 / 8),
    Section("the same, both as entries", "tokens", "tokens", None),
    Section("the same, both as prime-rl's server writes it", "prime", "prime", None),
    Section("22 MB routed-experts answer", "experts", "experts", 1 / 4, LONG_PROMPT),
)
MEMORY_TARGET = 1.5


class SilentRenderer:
    """Stands in for a renderer: knows one stop token and parses nothing."""

    supports_tools = True

    def get_stop_token_ids(self) -> list[int]:
        return [151_645]

    def parse_response(self, *_: object, **__: object) -> SimpleNamespace:
        return SimpleNamespace(
            content="", reasoning_content=None, tool_calls=[], reasoning_complete=None
        )


async def peer(url: str, prompt: int) -> tuple[Call, Callable[[], Awaitable[None]]]:
    from openai import AsyncOpenAI
    from renderers.client import generate

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    ids = list(range(prompt))
    arguments: dict[str, Any] = {"client": client, "renderer": SilentRenderer(), "messages": []}

    async def call() -> object:
        return await generate(**arguments, model="m", prompt_ids=ids)

    return call, client.close


async def ours(url: str, prompt: int) -> tuple[Call, Callable[[], Awaitable[None]]]:
    transport = await open_transport(url, "vllm")
    ids = list(range(prompt))

    async def call() -> object:
        return await transport.generate(Ask(prompt_ids=ids, model="m"))

    return call, transport.close


async def cpu(url: str, section: Section, repeats: int) -> tuple[float, float]:
    """Median CPU seconds per call of ours and of the peer, measured in turns."""
    our_call, our_close = await ours(f"{url}/{section.ours}", section.prompt)
    peer_call, peer_close = await peer(f"{url}/{section.peers}", section.prompt)
    spent: dict[Call, list[float]] = {our_call: [], peer_call: []}
    for turn in range(repeats + 2):
        for call, times in spent.items():
            gc.collect()
            before = process_time()
            await call()
            if turn >= 2:
                times.append(process_time() - before)
    await our_close()
    await peer_close()
    return median(spent[our_call]), median(spent[peer_call])


async def peak(who: str, url: str) -> None:
    """Prints what one call holds at its peak, in bytes."""
    call, close = await (ours if who == "ours" else peer)(url, LONG_PROMPT)
    tracemalloc.start()
    result = await call()
    print(tracemalloc.get_traced_memory()[1])
    del result
    await close()


def memory(who: str, url: str) -> int:
    """The peak of one call in a process of its own, so that nothing older is counted."""
    command = [sys.executable, "-m", "benchmarks.client", "--peak", who, url]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def verdict(value: float, target: float) -> str:
    return "ok" if value <= target else "MISSED"


def reached(ratio: float, target: float | None) -> str:
    return "" if target is None else f" (target 1/{1 / target:.0f}: {verdict(ratio, target)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peak", nargs=2, metavar=("WHO", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        asyncio.run(peak(*options.peak))
        return
    canned = bodies()
    with served(canned) as url:
        for section in SECTIONS:
            mine, theirs = asyncio.run(cpu(url, section, options.repeats))
            print(
                f"{section.title}: CPU {mine * 1e3:.1f} ms, renderers {theirs * 1e3:.1f} ms, "
                f"ratio 1/{theirs / mine:.1f}{reached(mine / theirs, section.target)}"
            )
        size = len(canned["experts"])
        for who in ("ours", "peer"):
            times = memory(who, f"{url}/experts") / size
            note = f" (target {MEMORY_TARGET}: {verdict(times, MEMORY_TARGET)})"
            name = "ours" if who == "ours" else "renderers"
            print(f"its peak memory, {name}: {times:.2f} x the body{note * (who == 'ours')}")


if __name__ == "__main__":
    main()
