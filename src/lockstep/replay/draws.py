"""Samples the recorded draws of a step again and compares every token.

A draw whose tokens have several weight versions is sampled once for each: the engine takes over the
tokens of the earlier versions, as a worker does when it is updated in the middle of a request.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.engine.engine import Engine
from lockstep.engine.options import EngineOptions
from lockstep.engine.sequence import EngineRequest
from lockstep.replay.findings import Replay, ReplayDifference
from lockstep.tokens import Completion
from lockstep.tokens.completion import VersionSpan
from lockstep.tokens.errors import LockstepError
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import RolloutDraw, RolloutGroup


@dataclass(frozen=True, slots=True)
class _Job:
    """Tokens [start, end) of a draw, all of one version, and their place in the step."""

    draw: RolloutDraw
    start: int
    end: int
    where: str


class DrawSampler:
    """An engine that samples under the weights of any version; a context manager.

    `directories` maps the labels of versions to their checkpoints, or adapters. The base weights
    are those of `model`.
    """

    def __init__(
        self, config: TrainConfig, model: Path, longest: int, choose: Callable[..., bool]
    ) -> None:
        """`longest` is the number of tokens of the longest sample; `choose(step, place)` decides
        which rollouts are sampled again.
        """
        learner = config.learner
        self._choose = choose
        self._adapter = learner.lora_name if learner.lora_rank else None
        options = EngineOptions(
            device=learner.device, dtype=learner.dtype, threads=learner.threads,
            max_model_len=longest + 1, weight_version="replay",
        )  # fmt: skip
        self.engine = Engine(model, options)
        self._served: str | None = None

    async def __aenter__(self) -> DrawSampler:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engine.__aexit__(*error)

    async def check(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        directories: dict[str, Path],
        outcome: Replay,
    ) -> None:
        """Sample all draws of a step again and compare them."""
        jobs: dict[str, list[_Job]] = defaultdict(list)
        for job, version in _jobs(groups, outcome, partial(self._choose, step)):
            jobs[version].append(job)
        for version in sorted(jobs):
            directory = directories.get(version)
            if directory is None:
                outcome.listed(f"tokens of version {version!r}, whose weights are not known",
                               sum(job.end - job.start for job in jobs[version]))  # fmt: skip
                continue
            await self._serve(version, directory)
            # In the order of the draws, so that differences are listed in the order of the step.
            results = await asyncio.gather(
                *(self._sample(job) for job in jobs[version]), return_exceptions=True
            )
            for job, sampled in zip(jobs[version], results, strict=True):
                self._compare(step, job, sampled, outcome)

    async def _serve(self, version: str, directory: Path) -> None:
        if self._served == version:
            return
        if self._adapter is not None:
            await self.engine.load_adapter(self._adapter, directory, "replay")
        else:
            await self.engine.stage(directory, "replay")
            await self.engine.commit()
        self._served = version

    async def _sample(self, job: _Job) -> Completion:
        request, recorded = job.draw.request, job.draw.completion
        sampling = replace(
            request.sampling,
            max_tokens=job.end,
            min_tokens=min(request.sampling.min_tokens, job.end),
        )
        completions = await self.engine.generate(
            EngineRequest(
                prompt_ids=list(request.prompt_ids),
                sampling=sampling,
                adapter=self._adapter,
                experts_start=request.experts_start,
                support=request.wants_support,
                earlier=_first_tokens(recorded, job.start) if job.start else None,
            )
        )
        return completions[0]

    def _compare(
        self, step: int, job: _Job, sampled: Completion | BaseException, outcome: Replay
    ) -> None:
        recorded = job.draw.completion

        def differs(what: str, where: str, before: Any, now: Any) -> None:
            outcome.differences.append(ReplayDifference(step, what, where, before, now))

        outcome.draws += 1
        outcome.tokens += job.end - job.start
        if isinstance(sampled, LockstepError):
            differs("draw", job.where, f"{job.end - job.start} tokens", sampled.message)
            return
        if isinstance(sampled, BaseException):
            raise sampled
        prompt = len(job.draw.request.prompt_ids)
        for at in range(job.start, job.end):
            where = f"{job.where}, token {prompt + at}"
            again = sampled.token_ids[at] if at < len(sampled.token_ids) else "nothing"
            if recorded.token_ids[at] != again:
                differs("token", where, recorded.token_ids[at], again)
                return
            if recorded.logprobs[at] != sampled.logprobs[at]:
                differs("logprob", where, recorded.logprobs[at], sampled.logprobs[at])
                return
        if _routes(recorded, prompt, job) != _routes(sampled, prompt, job):
            differs("routes", job.where, "experts", "other experts")
        elif recorded.support is not None and sampled.support is not None:
            span = job.start, job.end
            if recorded.support.slice(*span).lists() != sampled.support.slice(*span).lists():
                differs("support", job.where, "sets", "other sets")


def is_chosen(step: int, place: str, *, share: float, seed: int) -> bool:
    """Whether a rollout belongs to the share that a seed chooses, whatever else is chosen."""
    return random.Random(f"{seed} {step} {place}").random() < share


def _jobs(
    groups: Sequence[RolloutGroup], outcome: Replay, choose: Callable[[str], bool]
) -> Iterator[tuple[_Job, str]]:
    for at, group in enumerate(groups):
        for number, rollout in enumerate(group.rollouts):
            place = f"group {at}, rollout {number}"
            if not choose(place):
                continue
            if not rollout.draws:
                count = sum(sum(sample.sampled_mask) for sample in rollout.samples)
                outcome.listed("tokens that the environment's own program requested", count)
            for turn, draw in enumerate(rollout.draws):
                where = f"{place}, turn {turn}" if len(rollout.draws) > 1 else place
                if draw.request.sampling.seed is None:
                    outcome.listed("draws without a seed")
                    continue
                for span in draw.completion.versions:
                    yield _Job(draw, span.start, span.end, where), span.version


def _first_tokens(completion: Completion, count: int) -> Completion:
    """Return the first `count` tokens of a completion, without what is recorded beside them."""
    return Completion(
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        prompt_ids=completion.prompt_ids,
        finish="abort",
        versions=tuple(
            VersionSpan(span.version, span.start, min(span.end, count))
            for span in completion.versions
            if span.start < count
        ),
    )


def _routes(completion: Completion, prompt: int, job: _Job) -> bytes | None:
    """Return the routed experts of the tokens that a job computed.

    Its first draw needs the last token before it, and its own last token was never computed.
    """
    if completion.experts is None:
        return None
    start = completion.experts.start
    first, last = prompt + job.start - 1 - start, prompt + job.end - 1 - start
    return completion.experts.numpy()[max(first, 0) : last].tobytes()
