"""Rollouts made by a real engine in this process, for tests that need no servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.models import bundled
from lockstep.tokens import Sample, VersionSpan
from lockstep.train.config import TrainConfig
from lockstep.train.envs.environment import Reward
from lockstep.train.learning.batch import Clock, Rollout, RolloutGroup, TrainBatch, make_batch
from tests.engine.rig import Rig, ids, sample_of

VERSION = "step-0"


def directory(model: str) -> Path:
    directory = bundled(model)
    assert directory is not None
    return directory


def engine(model: str) -> Rig:
    """Return an engine whose completions a learner can be given: processed logprobs of VERSION."""
    return Rig(directory(model), weight_version=VERSION, logprob_mode="processed")


def sampled(
    model: str | Rig = "tiny", count: int = 4, tokens: int = 12, **options: Any
) -> list[Sample]:
    """Return samples of VERSION drawn by a model, or by an engine that was started before."""
    rig = model if isinstance(model, Rig) else engine(model)
    return [
        sample_of(rig.generate(ids(at, 9 + at), max_tokens=tokens, seed=at, **options))
        for at in range(count)
    ]


def grouped(samples: list[Sample], rewards: list[float] | None = None) -> list[RolloutGroup]:
    """One group; rewards count up by default."""
    values = rewards or [float(at) for at in range(len(samples))]
    pairs = zip(samples, values, strict=True)
    return [RolloutGroup(tuple(Rollout(Reward(value, value > 0), (s,)) for s, value in pairs))]


def batch(
    samples: list[Sample], config: TrainConfig | None = None, *, now: int = 0, limit: int = 0
) -> TrainBatch:
    clock = Clock({f"step-{step}": step for step in range(10)})
    return make_batch(grouped(samples), clock, now, config or TrainConfig(), limit)


def relabelled(sample: Sample, *versions: str) -> Sample:
    """The sample with its sampled tokens shared out evenly among versions."""
    start, end = sample.versions[0].start, sample.versions[-1].end
    size = (end - start) // len(versions)
    edges = [start + size * at for at in range(len(versions))] + [end]
    spans = [VersionSpan(v, a, b) for v, a, b in zip(versions, edges, edges[1:], strict=False)]
    return replace(sample, versions=tuple(spans))
