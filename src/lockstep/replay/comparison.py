"""Compares a repeated step with its record: bit for bit, or within a band on other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.chain.records import Record
from lockstep.replay.findings import Replay, ReplayDifference
from lockstep.train.learning.batch import TrainBatch
from lockstep.train.learning.learner import StepOutcome
from lockstep.train.records.step_contents import batch_digests
from lockstep.train.records.tensor_digests import Digests, combine

IN_BAND = ("loss", "entropy", "mismatch_max", "grad_norm")
"""Metrics that are compared where two machines compute other bits."""


def compare_step(
    outcome: Replay,
    record: Record,
    batch: TrainBatch,
    learnt: tuple[StepOutcome, Digests],
    recorded_tensors: Callable[[], Digests],
    bound: float,
) -> None:
    """Compare what a step learnt with its record. `bound` is the width of the band."""
    step, learning = int(record["step"]), record["learning"]
    result, digests = learnt
    own = batch_digests(batch, result.passes)
    for name, value in record["batch"].items():
        outcome.compare(step, "batch", value, own.get(name), name)
    if outcome.mode == "band":
        _compare_band(outcome, step, learning["metrics"], result.metrics, bound)
        return
    for name, value in learning["metrics"].items():
        outcome.compare(step, name, value, _as_recorded(result.metrics.get(name)))
    combined = combine(digests)
    for kind in ("gradients", "optimizer", "weights"):
        if learning[kind] == combined[kind]:
            outcome.digests += 1
        else:
            compare_tensors(outcome, step, recorded_tensors()[kind], digests[kind], kind)


def compare_tensors(
    outcome: Replay, step: int, recorded: Mapping[str, str], own: Mapping[str, str], kind: str
) -> None:
    """Compare tensors one by one; note the first that differs, and how many do."""
    differing = [name for name in recorded if recorded[name] != own.get(name)]
    outcome.digests += 1
    if differing:
        name = differing[0]
        where = f"{name} ({len(differing)} of {len(recorded)} tensors differ)"
        outcome.differences.append(
            ReplayDifference(step, kind, where, recorded[name], own.get(name, "no such tensor"))
        )


def _compare_band(
    outcome: Replay, step: int, recorded: Mapping[str, Any], own: Mapping[str, Any], bound: float
) -> None:
    for name in IN_BAND:
        before, now = float(recorded[name]), float(own[name])
        outcome.digests += 1
        if not abs(before - now) <= bound * max(1.0, abs(before)):
            outcome.differences.append(ReplayDifference(step, name, "", before, now))


def _as_recorded(value: Any) -> Any:
    """Return a number as JSON keeps it: NaN and infinities are text."""
    return repr(value) if isinstance(value, float) and value - value != 0 else value
