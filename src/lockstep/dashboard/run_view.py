"""A run directory as pages draw it: curves, lanes and events, and samples token by token."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from lockstep.dashboard.branch_tokens import runs
from lockstep.render.authors import messages
from lockstep.run_record import Row, Run, describe, lanes

SERIES = (
    "reward", "reward_std", "solved", "mismatch_kl", "masked_mismatch_kl", "mismatch_max",
    "compared_logprobs", "unequal_logprobs", "is_masked",
    "is_masked_low", "is_masked_high", "entropy", "loss", "grad_norm", "lr", "tokens",
    "tokens_per_second", "off_policy", "off_policy_max", "breaks", "aborts", "dropped",
    "pause_seconds", "time/rollout", "time/train", "time/save", "time/update", "time/step",
)  # fmt: skip


class RunMark(msgspec.Struct, frozen=True):
    """What changes when a run directory has something new."""

    name: str
    size: int


def curves(run: Run) -> Row:
    """One column per metric that the run has, and what happened beside the steps."""
    workers = sorted({w["id"] for step in run.steps for w in step.get("workers", ())})
    return {
        "steps": [step["step"] for step in run.steps],
        "series": {
            name: [number(step.get(name)) for step in run.steps]
            for name in SERIES
            if any(step.get(name) is not None for step in run.steps)
        },
        "versions": [str(step.get("version", "")) for step in run.steps],
        "ends": [round(end, 3) for end in run.ends()],
        "workers": workers,
        "lanes": lanes(run),
        "events": [
            {
                "at": round(float(event["time"]) - run.start, 3),
                "kind": event["kind"],
                "text": describe(event),
            }
            for event in shown_events(run)
        ],
    }


def shown_events(run: Run) -> list[Row]:
    """Events worth a line: updates happen at every step, and are drawn."""
    return [event for event in run.events if event["kind"] != "update"]


def pack(samples: Sequence[Row], most_bytes: int) -> tuple[list[list[Any]], list[Row], int]:
    """The samples without repetition, and how many did not fit.

    Token strings go into one table. Logprobs of the trainer are left out where they are the very
    number of the engine: the difference is taken here, before anything is rounded for the page.
    """
    table: dict[tuple[int, str], int] = {}
    packed = [_pack_one(sample, table) for sample in samples]
    sizes = [len(json.dumps(each)) for each in packed]
    keep = min(1.0, most_bytes / max(1, sum(sizes)))
    # evenly over the run, so that no step loses all of its samples
    kept = [each for at, each in enumerate(packed) if int((at + 1) * keep) > int(at * keep)]
    return [[token, text] for token, text in table], kept, len(packed) - len(kept)


def _pack_one(sample: Row, table: dict[tuple[int, str], int]) -> Row:
    sampled = sample["sampled_mask"]
    pairs = list(zip(sample["token_ids"], sample["token_strings"], strict=True))
    engine = [value for value, own in zip(sample["logprobs"], sampled, strict=True) if own]
    trainer = sample.get("trainer_logprobs")
    differences: dict[str, Any] = {}
    if trainer is not None:
        theirs = [value for value, own in zip(trainer, sampled, strict=True) if own]
        for at, (here, there) in enumerate(zip(engine, theirs, strict=True)):
            if there is None or here != there:
                differences[str(at)] = number(None if there is None else there - here)
    return {
        "step": sample["step"],
        "env": str(sample.get("env", "")),
        "reward": number(sample.get("reward")),
        "advantage": number(sample.get("advantage")),
        "workers": sample.get("workers") or [],
        "tokens": [table.setdefault(pair, len(table)) for pair in pairs],
        "sampled": runs(sampled),
        "roles": runs(sample["roles"]),
        "segments": [list(each) for each in messages(sample["token_strings"], sample["roles"])],
        "versions": runs(sample["versions"]),
        "logprobs": [number(value) for value in engine],
        "differences": differences,
        "scored": trainer is not None,
    }


def number(value: Any) -> Any:
    """Nine digits name a float32 exactly. JSON has no NaN, and a page must not hide one."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)
