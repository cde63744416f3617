"""The demo, end to end: the share of a training step in which neither engine nor trainer computes.

    python -m benchmarks.demo

`lockstep demo` as it is, with fewer steps: a gateway, two worker processes and a trainer, one
worker killed midway. Every time an engine computes (a step, a probe, loading weights) and every
time the trainer does (forward, backward and optimizer; saving its state, the weights and their
probe) is written down by one clock. What a step takes beyond the union of all these is outside:
HTTP, rendering, the gateway, making batches, checking checkpoints, control of updates, transcripts
and events of the run, waiting. The figures are medians of the steps.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console

from benchmarks import table
from benchmarks.table import Row
from lockstep.train.demo.demo import run_demo
from lockstep.train.demo.options import Demo
from lockstep.train.learning.learner import Learner
from lockstep.train.records.step_metrics import StepMetrics
from lockstep.train.steps import StepRunner

STEPS = 12
EVAL_PROMPTS = 8
CLOCKED = Path(__file__).parent / "clocked"
Span = tuple[float, float]


def rows() -> list[Row]:
    outside, steps = measure()
    return [
        Row(
            what="a step of the demo, outside engine and trainer",
            against="the whole step",
            ours=median(outside),
            theirs=median(steps),
            unit="s",
            note=f"medians of {len(steps)} steps",
        )
    ]


def measure() -> tuple[list[float], list[float]]:
    """Of each step: the seconds outside, and all of them."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
        log = Path(directory) / "clocked"
        demo = Demo(run_dir=Path(directory) / "run", steps=STEPS, eval_prompts=EVAL_PROMPTS)
        with environment(CLOCKED=str(log), PYTHONPATH=paths()), clocked() as (busy, steps):
            asyncio.run(run_demo(demo, Console(file=open(os.devnull, "w"))))  # noqa: SIM115
        for line in log.read_text().splitlines():
            begin, end, _ = line.split()
            busy.append((float(begin), float(end)))
    return [uncovered(step, busy) for step in steps], [end - begin for begin, end in steps]


def paths() -> str:
    return os.pathsep.join(filter(None, (str(CLOCKED), os.environ.get("PYTHONPATH"))))


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def clocked() -> Iterator[tuple[list[Span], list[Span]]]:
    """When the trainer of this process computed, and when each step began and ended."""
    busy: list[Span] = []
    steps: list[Span] = []
    methods = ((Learner, "step"), (StepRunner, "save"), (StepRunner, "report"))
    originals = [getattr(owner, name) for owner, name in methods]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begun = perf_counter()
            try:
                return method(*arguments)
            finally:
                busy.append((begun, perf_counter()))

        return call

    def report(runner: StepRunner, draft: StepMetrics, *rest: Any) -> None:
        now = perf_counter()
        steps.append((now - draft.time_step, now))
        originals[-1](runner, draft, *rest)

    wrapped = [timed(originals[0]), timed(originals[1]), report]
    try:
        for (owner, name), method in zip(methods, wrapped, strict=True):
            setattr(owner, name, method)
        yield busy, steps
    finally:
        for (owner, name), method in zip(methods, originals, strict=True):
            setattr(owner, name, method)


def uncovered(whole: Span, spans: Sequence[Span]) -> float:
    """Seconds of `whole` in none of the spans."""
    at, end = whole
    outside = 0.0
    for begin, stop in sorted(spans):
        if begin >= end:
            break
        outside += max(0.0, begin - at)
        at = max(at, stop)
    return outside + max(0.0, end - at)


if __name__ == "__main__":
    table.main(rows, __doc__)
