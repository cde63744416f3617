"""Samples for tests of exports, with logprobs whose bits are easily lost."""

from __future__ import annotations

import numpy as np

from lockstep.tokens import Sample, ShapedSpan, Shaping, Support, VersionSpan
from lockstep.tokens.experts import RoutedExperts
from lockstep.tokens.sample import TrainedSpan


def float32(count: int, seed: int) -> list[float]:
    """Logprobs as an engine computes them: float32, with every bit in use."""
    values = -np.random.default_rng(seed).exponential(1.7, count).astype(np.float32)
    return [float(value) for value in values]


def two_turns(seed: int = 0) -> Sample:
    """A prompt, a turn of five tokens over two versions, a tool's answer, a turn of three."""
    first, second = float32(5, seed), float32(3, seed + 1)
    mask = [False] * 4 + [True] * 5 + [False] * 2 + [True] * 3
    return Sample(
        token_ids=[151644, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 2**31 - 1],
        sampled_mask=mask,
        logprobs=[0.0] * 4 + first + [0.0] * 2 + second,
        versions=(VersionSpan("v1", 4, 7), VersionSpan("v2", 7, 9), VersionSpan("v2", 11, 14)),
        logprob_mode="processed",
        temperature=0.7,
        experts=RoutedExperts(bytes(range(26)), (13, 1, 2), "uint8", 0),
        shaping=(ShapedSpan(4, 9, Shaping(top_p=0.9)),),
        support=Support.join(
            [
                Support.unrecorded(4, 100),
                Support.of_ids([[10], [11, 40], [12], list(range(100)), [3, 14]], 100),
                Support.unrecorded(5, 100),
            ]
        ),
        workers=("w0", "w1"),
        trained_in=(TrainedSpan(0, 1, 3),),
        stops=((8, 9),),
        notes=({"user": "Ann", "metadata": {"a": 1}},),
        breaks=("edited_history",),
        reward=0.1,
        kind="subagent",
        parent=2,
        depth=1,
        harness="codex",
    )
