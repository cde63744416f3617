"""Decoding speed of the embedded engine beside transformers' own continuous batching.

    python benchmarks/engine.py [--json] [--model tiny] [--rounds 5]

Both serve the same model in this process with one torch thread, fp32, and sample at temperature 1.
Rounds alternate between them, so that a busy machine slows both alike. Prompts have 512 tokens; a
warm-up round puts them into both prefix caches, so that all requests of a round decode together.
Counted are the tokens that come while every request of the round is decoding; the figure is the
median of the rounds. Exits with 1 when the ratio at batch 32 is below 4.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lockstep.engine import Engine, EngineOptions, Request
from lockstep.models import bundled
from lockstep.tokens import Sampling

TOKENS = {1: 320, 8: 120, 32: 48, 64: 40}
"""Batches, and tokens per request: enough for a second or so, in which small disturbances drown."""
PROMPT = 512
WARM_UP = 4
TARGET_BATCH, TARGET = 32, 4.0
PAGE = 16

Prompts = list[list[int]]
Times = list[list[float]]
"""When each token of each request came."""
Play = Callable[[Prompts, int], Times]
Pause = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Row:
    batch: int
    lockstep: float
    transformers: float

    @property
    def ratio(self) -> float:
        return self.lockstep / self.transformers


def rate(times: Times) -> float:
    """Tokens per second while all requests were decoding."""
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    if end <= begin:
        raise RuntimeError("the requests of a round never decoded all at once")
    tokens = sum(begin < at <= end for request in times for at in request)
    return tokens / (end - begin)


@contextmanager
def lockstep(directory: Path, batch: int) -> Iterator[Play]:
    """The embedded engine with its defaults, asked through its async API."""
    engine = Engine(directory, EngineOptions(max_seqs=batch, max_model_len=1024))

    steps: list[tuple[float, int]] = []
    compute = engine.core.step

    def step() -> None:
        before = engine.core.generated_tokens
        compute()
        steps.append((time.perf_counter(), engine.core.generated_tokens - before))

    engine.core.step = step  # type: ignore[method-assign]

    async def generate(prompts: Prompts, tokens: int) -> None:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        requests = [Request(prompt_ids=prompt, sampling=sampling) for prompt in prompts]
        await asyncio.gather(*(engine.generate(request) for request in requests))

    def play(prompts: Prompts, tokens: int) -> Times:
        steps.clear()
        asyncio.run(generate(prompts, tokens))
        whole = [at for at, sampled in steps if sampled == len(prompts)]
        return [whole] * len(prompts)

    engine.start()
    try:
        yield play
    finally:
        engine.close()


@contextmanager
def transformers(model: Any, batch: int) -> Iterator[tuple[Play, Pause]]:
    """Continuous batching of transformers, with blocks for the round and what is cached of it.

    Its thread polls while it has nothing to do: it is to be paused while others are measured.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks = 3 * batch * (PROMPT + TOKENS[batch] + PAGE) // PAGE
    sizes = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=blocks, max_batch_tokens=1024, use_cuda_graph=False
    )
    sampling = GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=-1, pad_token_id=0)
    context = model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=sizes
    )
    with context as manager:

        def play(prompts: Prompts, tokens: int) -> Times:
            asked = set(manager.add_requests(prompts, tokens, record_timestamps=True))
            times: Times = []
            while len(times) < len(asked):
                result = manager.get_result(timeout=60)
                if result is None or result.error is not None:
                    raise RuntimeError(f"transformers gave no answer: {result and result.error}")
                times.append(result.timestamps)
            return times

        yield play, manager.pause


def measure(directory: Path, model: Any, batch: int, rounds: int) -> Row:
    rng = random.Random(batch)
    vocab = model.config.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(batch)]
    ours: list[float] = []
    theirs: list[float] = []
    with (
        lockstep(directory, batch) as play_ours,
        transformers(model, batch) as (
            play_theirs,
            pause_theirs,
        ),
    ):
        for play in (play_ours, play_theirs):
            play(prompts, WARM_UP)
        for _ in range(rounds):
            with pause_theirs():
                ours.append(rate(play_ours(prompts, TOKENS[batch])))
            theirs.append(rate(play_theirs(prompts, TOKENS[batch])))
    return Row(batch, median(ours), median(theirs))


def table(rows: list[Row]) -> str:
    lines = [f"{'batch':>5}  {'lockstep tok/s':>14}  {'transformers tok/s':>18}  {'ratio':>6}"]
    lines += [
        f"{row.batch:>5}  {row.lockstep:>14,.0f}  {row.transformers:>18,.0f}  {row.ratio:>5.1f}x"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--model", default="tiny", help="a bundled model or a directory")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds for each batch")
    options = parser.parse_args()

    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    directory = bundled(options.model) or Path(options.model)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rows = [measure(directory, model, batch, options.rounds) for batch in TOKENS]
    if options.json:
        figures = [asdict(row) | {"ratio": row.ratio} for row in rows]
        print(json.dumps({"model": options.model, "prompt_tokens": PROMPT, "rows": figures}))
    else:
        print(f"Decoding after {PROMPT}-token prompts, one thread, medians of {options.rounds}\n")
        print(table(rows))
    reached = next(row.ratio for row in rows if row.batch == TARGET_BATCH)
    if reached < TARGET:
        print(f"\nratio at batch {TARGET_BATCH} is {reached:.1f}, below {TARGET}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
