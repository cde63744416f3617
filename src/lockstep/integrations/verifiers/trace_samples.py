"""Samples from verifiers traces: one for every branch, with the versions of its tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.integrations.verifiers.lockstep_client import key_of
from lockstep.tokens import Sample, ShapedSpan, Shaping, Support, VersionSpan
from lockstep.tokens.errors import Conflict
from lockstep.tokens.support import PackedSupport


def trace_samples(trace: Any) -> list[Sample]:
    """Return a sample for each branch of a trace with sampled tokens.

    A sampled token that two branches share is trained in the first only. Raises Conflict for turns
    that did not go through LockstepClient, and for turns of one branch that were sampled at
    different temperatures.
    """
    records = {turn["key"]: turn for turn in trace.info.get("lockstep", {}).get("turns", [])}
    samples: list[Sample] = []
    trained: set[int] = set()
    for branch in trace.branches:
        sample = _sample(branch, records, trained)
        if sample is not None:
            samples.append(sample)
    return samples


def _sample(branch: Any, records: dict[int, Any], trained: set[int]) -> Sample | None:
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    modes: set[tuple[str, float]] = set()
    shaping: list[ShapedSpan] = []
    supports: list[tuple[int, Support]] = []
    for node in branch.nodes:
        ids += node.token_ids
        count = sum(node.mask)
        start = len(ids) - count
        # A node that several branches share is trained in the first branch only.
        fresh = count > 0 and id(node) not in trained
        mask += [bool(sampled) and fresh for sampled in node.mask]
        logprobs += [0.0] * (len(node.token_ids) - count)
        logprobs += node.logprobs if fresh else [0.0] * count
        if not fresh:
            continue
        trained.add(id(node))
        record = records.get(key_of(ids))
        if record is None:
            raise Conflict(
                "a turn of this trace has no weight versions: its client was not LockstepClient; "
                "call lockstep.integrations.verifiers.install() before the rollouts"
            )
        modes.add((record["logprob_mode"], record["temperature"]))
        versions += [
            VersionSpan(label, start + first, start + end)
            for label, first, end in record["versions"]
        ]
        if record["shaping"] is not None:
            options = msgspec.convert(record["shaping"], Shaping)
            shaping.append(ShapedSpan(start, len(ids), options))
        if record["support"] is not None:
            supports.append((start, msgspec.convert(record["support"], PackedSupport).value()))
    if not versions:
        return None
    if len(modes) > 1:
        raise Conflict(
            f"turns of one branch have different logprob modes or temperatures: {sorted(modes)}"
        )
    ((mode, temperature),) = modes
    breaks = tuple(record["cause"] for record in records.values() if record["cause"] is not None)
    return Sample(
        token_ids=ids,
        sampled_mask=mask,
        logprobs=logprobs,
        versions=tuple(versions),
        logprob_mode=mode,  # type: ignore[arg-type]
        temperature=temperature,
        breaks=breaks,
        shaping=tuple(shaping),
        support=Support.placed(supports, len(ids)),
    )
