"""One contestant of the engine benchmark as a process that plays rounds on request.

A contestant is pinned to one core before anything else is loaded. It reads one JSON object a line,
`{"batch": 8, "seed": 3}`, plays that round, and writes its figures as one line. Needs nothing but
the standard library, as it also runs in the environment of a peer.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable

PROMPT = 512
VOCABULARY = 500
FEW = 4
TOKENS = {1: 160, 8: 64, 32: 24, 64: 16}
"""Batches, and the tokens per request that decoding is measured over."""

Generate = Callable[[list[list[int]], int], None]
"""Completes all prompts at once, each with exactly so many tokens, sampled at temperature 1."""


def pin() -> None:
    """One core and one thread for this process, whatever it will load."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def serve(generate: Generate) -> None:
    """Plays rounds until the input ends. Call `pin` first."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no figure
    print("ready", file=output, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        print(json.dumps(play(generate, call["batch"], call["seed"])), file=output, flush=True)


def play(generate: Generate, batch: int, seed: int) -> dict[str, float]:
    """Tokens per second of CPU time: prompts that nobody has seen, then decoding after them.

    The prompts come again for decoding, so that prefix caches have them, and a short run is taken
    from a long one: what is left is the time of decoding alone, all requests at once.
    """
    rng = random.Random(seed * 1000 + batch)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(batch)]
    more = TOKENS[batch]
    fresh = seconds(generate, prompts, 1)
    seconds(generate, prompts, FEW)
    short = seconds(generate, prompts, FEW)
    long = seconds(generate, prompts, FEW + more)
    return {"prefill": batch * PROMPT / fresh, "decode": batch * more / (long - short)}


def seconds(generate: Generate, prompts: list[list[int]], tokens: int) -> float:
    """CPU time of this process, all its threads."""
    begun = time.process_time()
    generate(prompts, tokens)
    return time.process_time() - begun
