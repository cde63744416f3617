"""Samples for the report: every token with its author, logprobs and version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lockstep.render.authors import authors
from lockstep.tokens import Sample
from lockstep.tokens.support import PackedSupport
from lockstep.train.learning.batch import TrainBatch


def transcripts(
    step: int,
    env: str,
    batch: TrainBatch,
    logprobs: Sequence[list[float]],
    tokenizer: Any,
    count: int,
) -> list[dict[str, Any]]:
    """Return up to `count` samples of a step, alternating from the best and the worst reward."""
    by_reward = sorted(range(len(batch.items)), key=lambda at: batch.items[at].reward)
    ends = [at for pair in zip(reversed(by_reward), by_reward, strict=True) for at in pair]
    lines = []
    for at in list(dict.fromkeys(ends))[:count]:
        item = batch.items[at]
        sample = item.sample
        strings = [tokenizer.decode([token]) for token in sample.token_ids]
        versions: list[str | None] = [None] * len(strings)
        for span in sample.versions:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        lines.append(
            {
                "step": step,
                "env": env,
                "reward": item.reward,
                "advantage": item.advantage,
                "token_ids": sample.token_ids,
                "token_strings": strings,
                "sampled_mask": sample.sampled_mask,
                "logprobs": sample.logprobs,
                "trainer_logprobs": logprobs[at],
                "versions": versions,
                "roles": authors(strings, sample.sampled_mask),
                "workers": list(sample.workers),
                **_drawn(sample),
            }
        )
    return lines


def _drawn(sample: Sample) -> dict[str, Any]:
    """Return the options and the supports of a sample, if it has any."""
    fields: dict[str, Any] = {}
    if sample.shaping:
        fields["shaping"] = msgspec.to_builtins(sample.shaping)
    if sample.support is not None:
        fields["support"] = msgspec.to_builtins(PackedSupport.of(sample.support))
    return fields
