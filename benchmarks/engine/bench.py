"""The embedded engine beside vLLM and transformers' continuous batching, on one core each.

All three serve the bundled model `tiny` in fp32, up to 1,024 tokens a step, and sample at
temperature 1; ours and vLLM give the logprob of each token, transformers none. Prompts have 512
tokens. Each contestant is one process, pinned to one core with one thread; while one plays the
others are stopped. Counted is CPU time of the process, all its threads: with one core that is what
a user waits for, less what other programs take away.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

from benchmarks import peers, table
from benchmarks.engine.play import PROMPT, TOKENS
from benchmarks.table import Row
from lockstep.models import bundled

ROUNDS = 3
LOCKSTEP = "lockstep"
PEERS = ("vLLM", "transformers CB")
HEADLINE = ("decode", "vLLM", 32)
"""The row that opens the page."""


@dataclass(frozen=True)
class Contestant:
    """A process that plays one round at a time, and is stopped in between."""

    process: subprocess.Popen[str]

    def play(self, batch: int, seed: int) -> dict[str, float]:
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the contestant has no pipes")
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"batch": batch, "seed": seed}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait()}")
        self.process.send_signal(signal.SIGSTOP)
        figures: dict[str, float] = json.loads(line)
        return figures


@contextmanager
def started(*command: str) -> Iterator[Contestant]:
    """The contestant of that command, ready and stopped."""
    process = subprocess.Popen(
        command, cwd=peers.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{command} did not start: run it by hand to see why")
        process.send_signal(signal.SIGSTOP)
        yield Contestant(process)
    finally:
        process.kill()
        process.wait()


def measured() -> dict[tuple[str, int, str], float]:
    """Medians by contestant, batch and what was measured."""
    ours, model = sys.executable, str(bundled("tiny"))
    commands = {
        LOCKSTEP: (ours, "-m", "benchmarks.engine.lockstep"),
        "transformers CB": (ours, "-m", "benchmarks.engine.transformers"),
        "vLLM": (str(peers.python("vllm")), "-m", "benchmarks.engine.vllm", model),
    }
    seen: dict[tuple[str, int, str], list[float]] = {}
    with ExitStack() as stack:
        contestants = {
            name: stack.enter_context(started(*command)) for name, command in commands.items()
        }
        for seed in range(ROUNDS + 1):
            for batch in TOKENS:
                for name, contestant in contestants.items():
                    for what, value in contestant.play(batch, seed).items():
                        # The first round warms caches and compilers up.
                        if seed:
                            seen.setdefault((name, batch, what), []).append(value)
    return {key: median(values) for key, values in seen.items()}


def rows() -> list[Row]:
    medians = measured()
    return [
        Row(
            what=f"{what}, batch {batch}",
            against=peer,
            ours=medians[LOCKSTEP, batch, what],
            theirs=medians[peer, batch, what],
            unit="tokens/CPU s",
            headline=f"engine on one core: {what}, batch {batch}"
            if (what, peer, batch) == HEADLINE
            else "",
        )
        for what in ("decode", "prefill")
        for peer in PEERS
        for batch in TOKENS
    ]


if __name__ == "__main__":
    print(f"prompts of {PROMPT} tokens, medians of {ROUNDS} rounds")
    table.main(rows, __doc__)
