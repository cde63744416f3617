"""Speed of the embedded engine in exact mode beside itself in close mode.

Both serve the bundled model `tiny`, each a process of its own on one core, as in the comparison
with other engines. Close mode runs with MKL as it is by default, exact mode with MKL as it must be.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from statistics import median

from benchmarks import table
from benchmarks.engine.bench import ROUNDS, started
from benchmarks.engine.play import TOKENS
from benchmarks.table import Row

MODES = ("exact", "close")


def rows() -> list[Row]:
    seen: dict[tuple[str, int, str], list[float]] = {}
    with ExitStack() as stack:
        contestants = {
            mode: stack.enter_context(
                started(sys.executable, "-m", "benchmarks.engine.lockstep", mode)
            )
            for mode in MODES
        }
        for seed in range(ROUNDS + 1):
            for batch in TOKENS:
                for mode, contestant in contestants.items():
                    for what, value in contestant.play(batch, seed).items():
                        if seed:  # the first round warms up
                            seen.setdefault((mode, batch, what), []).append(value)
    medians = {key: median(values) for key, values in seen.items()}
    return [
        Row(
            what=f"{what}, batch {batch}, exact",
            against="close",
            ours=medians["exact", batch, what],
            theirs=medians["close", batch, what],
            unit="tokens/CPU s",
        )
        for what in ("decode", "prefill")
        for batch in TOKENS
    ]


if __name__ == "__main__":
    table.main(rows, __doc__)
