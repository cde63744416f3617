"""Proves exact arithmetic on a GPU with real requests: part of `benchmarks/gpu.py`, by `--exact`.

The same requests run in batches of 256, 32, 7 and 1, their tokens are scored again as prompts in
several cuts and after hits of the prefix cache, and a prepared transformers module scores them as a
trainer would. Every logprob is compared bit for bit.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

REQUESTS, TOKENS = 256, 400
CUTS = (8192, 1000, 333, 97, 64)
"""Tokens of a step, by which prompts are cut."""


class Comparison:
    """Counts equal and different logprobs of one claim."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.different, self.worst = name, 0, 0, 0.0

    def add(self, ours: list[float], theirs: list[float]) -> None:
        self.count += len(ours)
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True) if a != b]
        self.different += len(gaps)
        self.worst = max([self.worst, *gaps])

    def show(self) -> None:
        print(f"| {self.name} | {self.count:,} | {self.different} | {self.worst:g} |", flush=True)


def run(model: Any, directory: Path) -> None:
    """Prints a line for every way in which the same tokens were computed."""
    from lockstep.engine import Engine, EngineOptions, EngineRequest, exact
    from lockstep.tokens import Sampling

    rng = random.Random(0)
    prompts = [
        [rng.randrange(151_000) for _ in range(rng.randrange(16, 400))] for _ in range(REQUESTS)
    ]
    options = EngineOptions(
        device="cuda", dtype="bfloat16", arithmetic="exact", max_seqs=REQUESTS, max_model_len=832,
        max_batch_tokens=8192, kv_bytes=40 << 30, prefix_cache_bytes=4 << 30,
    )  # fmt: skip
    begun = time.perf_counter()
    engine = Engine(directory, options)
    print(f"start {time.perf_counter() - begun:.1f} s; {engine.core.warm_note}; {engine.plan}\n")
    print(
        "| beside batches of 256 | logprobs | different | largest difference |\n|---|---|---|---|"
    )

    async def play(numbers: list[int]) -> list[Any]:
        requests = [
            EngineRequest(
                prompt_ids=prompts[at],
                sampling=Sampling(max_tokens=TOKENS, ignore_eos=True, seed=at),
                skip_prefix_cache=True,
            )
            for at in numbers
        ]
        return [each for (each,) in await asyncio.gather(*map(engine.generate, requests))]

    async def compare() -> list[Any]:
        first = await play(list(range(REQUESTS)))
        for batch, count in ((256, REQUESTS), (32, REQUESTS), (7, 70), (1, 12)):
            claim = Comparison(f"batches of {batch}")
            for start in range(0, count, batch):
                numbers = list(range(start, min(start + batch, count)))
                for at, each in zip(numbers, await play(numbers), strict=True):
                    if each.token_ids != first[at].token_ids:
                        raise RuntimeError(f"request {at} drew other tokens in batches of {batch}")
                    claim.add(each.logprobs, first[at].logprobs)
            claim.show()
        whole = [[*each.prompt_ids, *each.token_ids] for each in first]
        for cut in CUTS:
            engine.core.options = replace(options, max_batch_tokens=cut)
            claim = Comparison(f"the same tokens as prompts, {cut} a step")
            some = first if cut > 300 else first[:32]
            scored = await engine.score_all(whole[: len(some)])
            for each, values in zip(some, scored, strict=True):
                claim.add(values[-TOKENS:], each.logprobs)
            claim.show()
        engine.core.options = options
        claim = Comparison("the last 64 tokens after a hit of the prefix cache")
        for start in range(0, REQUESTS, 64):
            group = first[start : start + 64]
            requests = [
                EngineRequest(
                    prompt_ids=[*each.prompt_ids, *each.token_ids[:-64]],
                    sampling=Sampling(max_tokens=64, ignore_eos=True, seed=start + at),
                )
                for at, each in enumerate(group)
            ]
            hits = engine.core.prefixes.hits
            await asyncio.gather(*map(engine.generate, requests))
            again = await asyncio.gather(*map(engine.generate, requests))
            if engine.core.prefixes.hits == hits:
                raise RuntimeError("the prefix cache was never hit")
            results = [each for (each,) in again]
            whole = [[*each.prompt_ids, *each.token_ids] for each in results]
            for each, values in zip(results, await engine.score_all(whole), strict=True):
                claim.add(each.logprobs, values[-64:])
        claim.show()
        return first

    engine.start()
    try:
        first = asyncio.run(compare())
    finally:
        engine.close()
    exact.prepare(model)
    claim = Comparison("transformers after exact.prepare")
    with torch.no_grad():
        for start in range(0, REQUESTS, 4):
            group = first[start : start + 4]
            rows = exact.token_logprobs(model, [[*c.prompt_ids, *c.token_ids] for c in group])
            for each, row in zip(group, rows, strict=True):
                claim.add(row[-TOKENS:].tolist(), each.logprobs)
    claim.show()
