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
    """State of a run directory that changes when the run has written something."""

    name: str
    size: int


def curves(run: Run) -> Row:
    """Return one column per metric of the run, and its events."""
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
    """Return the events that get a line; updates are drawn instead, as every step has one."""
    return [event for event in run.events if event["kind"] != "update"]


def pack(samples: Sequence[Row], most_bytes: int) -> tuple[list[list[Any]], list[Row], int]:
    """Return the samples without repetition, and how many did not fit.

    Token strings are stored in one table. Logprobs of the trainer are left out where they equal the
    engine's: the difference is computed here, before numbers are rounded for the page.
    """
    table: dict[tuple[int, str], int] = {}
    packed = [_pack_one(sample, table) for sample in samples]
    sizes = [len(json.dumps(entry)) for entry in packed]
    keep = min(1.0, most_bytes / max(1, sum(sizes)))
    # Keep samples evenly over the run, so that no step loses all of them.
    fitting = [entry for at, entry in enumerate(packed) if int((at + 1) * keep) > int(at * keep)]
    return [[token, text] for token, text in table], fitting, len(packed) - len(fitting)


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
        "segments": [
            list(message) for message in messages(sample["token_strings"], sample["roles"])
        ],
        "versions": runs(sample["versions"]),
        "logprobs": [number(value) for value in engine],
        "differences": differences,
        "scored": trainer is not None,
    }


def number(value: Any) -> Any:
    """Return a number for the page: nine digits identify a float32. JSON has no NaN, and a page
    must not hide one.
    """
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)
