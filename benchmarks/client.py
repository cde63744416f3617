"""CPU time of the client beside renderers.client.generate 0.1.12: same responses, same run.

Both talk HTTP to one server in another process; what is measured is CPU time of this process.
The peer gets a renderer that parses nothing, so only its transport and checks are counted.

    python -m benchmarks.client
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any

from benchmarks import conversation, table
from benchmarks.canned import LONG_PROMPT, PROMPT, bodies, served
from benchmarks.table import Row
from lockstep.backends.registry import open_transport
from lockstep.backends.transport import GenerateRequest

Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Section:
    """One comparison: the bodies that each side gets."""

    title: str
    ours: str
    peers: str
    prompt: int = PROMPT
    note: str = ""
    headline: str = ""


SECTIONS = (
    Section(
        "a response of 8,192 tokens from a Lockstep server",
        "flat",
        "tokens",
        note="ours requests bare logprobs",
        headline="client: a response of 8,192 tokens with logprobs",
    ),
    Section("the same body for both: entries with ids", "tokens", "tokens"),
    Section("the same body for both: as prime-rl's server writes it", "prime", "prime"),
    Section("a response with 22 MB of routed experts", "experts", "experts", LONG_PROMPT),
)
REPEATS = 15


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
        return await transport.generate(GenerateRequest(prompt_ids=ids, model="m"))

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


def rows() -> list[Row]:
    canned = bodies()
    peer_name = f"renderers {version('renderers')}"
    measured = []
    with served(canned) as url:
        for section in SECTIONS:
            mine, theirs = asyncio.run(cpu(url, section, REPEATS))
            measured.append(
                Row(
                    what=section.title,
                    against=peer_name,
                    ours=mine * 1e3,
                    theirs=theirs * 1e3,
                    unit="ms CPU",
                    note=section.note,
                    headline=section.headline,
                )
            )
        size = len(canned["experts"])
        peaks = {who: memory(who, f"{url}/experts") / size for who in ("ours", "peer")}
    measured.append(
        Row(
            what="peak memory of that response",
            against=peer_name,
            ours=peaks["ours"],
            theirs=peaks["peer"],
            unit="x the body",
        )
    )
    return measured + conversation.rows()


def main() -> None:
    if sys.argv[1:2] == ["--peak"]:
        asyncio.run(peak(*sys.argv[2:4]))
    else:
        table.main(rows, __doc__)


if __name__ == "__main__":
    main()
