"""Runs the whole collection of faults and clean runs, and prints the score.

python -m tests.explain.collection [--faults NAME ...] [--clean N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from lockstep.explain.explanation import Explanation
from lockstep.models import bundled
from tests.engine import checkpoints
from tests.explain.faults import FAULTS, Fault
from tests.explain.scene import Scene, verdict_of

UPDATE = 0.02
"""Size of an update's change, as part of each tensor's standard deviation."""
DTYPES = ("float32", "bfloat16", "float16")


def scene_of(model: str, scratch: Path, seed: int = 3) -> Scene:
    """Return a scene of a bundled model and an update of it."""
    old = bundled(model)
    assert old is not None
    new = checkpoints.variant(old, scratch / f"{model}-{seed}", seed=seed, scale=UPDATE)
    return Scene(old=old, new=new, scratch=scratch)


def run_fault(fault: Fault, scratch: Path) -> Explanation:
    return verdict_of(fault.inject(scene_of(fault.model, scratch)))


def clean_runs(count: int, scratch: Path) -> Iterator[tuple[str, Explanation]]:
    """Yield the verdicts of healthy runs: both models, all dtypes, and different batches."""
    for at in range(count):
        model = ("tiny", "tiny-moe")[at % 5 == 4]
        dtype = DTYPES[at % 3] if model == "tiny" or at % 2 else "float32"
        place = scratch / f"clean-{at}"
        scene = scene_of(model, place, seed=10 + at % 4)
        arithmetic = "close" if at % 4 == 3 else "auto"
        scene.options = {"dtype": dtype, "max_seqs": (1, 3, 8)[at % 3], "arithmetic": arithmetic}
        scene.sampling = ({}, {"temperature": 0.7}, {"top_p": 0.9}, {"repetition_penalty": 1.2})[
            at % 4
        ]
        name = f"{model} {dtype} {arithmetic} {scene.options['max_seqs']} {scene.sampling}"
        samples = scene.rollout(seed=at, turns=1 + at % 2, count=3 + at % 4)
        yield name, verdict_of(scene.case(samples, engine_dtype=dtype))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", nargs="*")
    parser.add_argument("--clean", type=int, default=50)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    named, seconds = 0, []
    faults = [f for f in FAULTS if chosen.faults is None or f.name in chosen.faults]
    with tempfile.TemporaryDirectory() as scratch:
        for fault in faults:
            started = time.perf_counter()
            verdict = run_fault(fault, Path(scratch) / fault.name)
            right = verdict.cause in fault.causes
            place = verdict.causes[0].location if verdict.causes else ""
            right_place = fault.where in place
            named += right and right_place
            seconds.append(verdict.seconds)
            mark = "named" if right and right_place else "MISSED" if not verdict.cause else "WRONG"
            sys.stdout.write(
                f"{mark:7}{fault.name}: {verdict.sentence} [{place}] {verdict.passes} passes "
                f"{verdict.seconds:.1f} s of {time.perf_counter() - started:.1f} s\n"
            )
            for cause in verdict.causes[:1]:
                sys.stdout.write(f"        ties: {cause.ties}\n" if cause.ties else "")
            if mark != "named":
                sys.stdout.write("        " + "\n        ".join(verdict.lines()) + "\n")
            sys.stdout.flush()
        alarms = 0
        for name, verdict in clean_runs(chosen.clean, Path(scratch)):
            if verdict.outcome != "healthy":
                alarms += 1
                sys.stdout.write(f"ALARM  {name}: " + "\n        ".join(verdict.lines()) + "\n")
                sys.stdout.flush()
    sys.stdout.write(
        f"{named} of {len(faults)} faults named first; {alarms} alarms in {chosen.clean} clean "
        f"runs; median {statistics.median(seconds or [0]):.1f} s\n"
    )


if __name__ == "__main__":
    main()
