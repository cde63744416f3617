"""A Core driven by hand, without a thread: submit, step, and inspect the events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.engine import EngineOptions, EngineRequest, StreamedToken
from lockstep.engine.core import Core, PauseMode
from lockstep.engine.sequence import Event, RequestHandle
from lockstep.tokens import (
    Completion,
    LockstepError,
    Sample,
    Sampling,
    ShapedSpan,
    Support,
    VersionSpan,
)

REQUEST_FIELDS = {f.name for f in fields(EngineRequest)} - {"prompt_ids", "sampling"}


def ids(seed: int, length: int, vocab: int = 500) -> list[int]:
    """Return a prompt that is unique to its seed."""
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def request(prompt: list[int], **options: Any) -> EngineRequest:
    """Return a seeded request. Options that it does not have itself go to its Sampling."""
    own = {name: options.pop(name) for name in list(options) if name in REQUEST_FIELDS}
    sampling = {"seed": 7, "ignore_eos": True, "max_tokens": 8} | options
    return EngineRequest(prompt_ids=prompt, sampling=Sampling(**sampling), **own)


def sample_of(completion: Completion) -> Sample:
    """Return the training sample of one completion."""
    before, count = len(completion.prompt_ids), len(completion.token_ids)
    shaping = completion.shaping
    return Sample(
        token_ids=[*completion.prompt_ids, *completion.token_ids],
        sampled_mask=[False] * before + [True] * count,
        logprobs=[0.0] * before + completion.logprobs,
        versions=tuple(
            VersionSpan(span.version, before + span.start, before + span.end)
            for span in completion.versions
        ),
        logprob_mode=completion.logprob_mode,
        temperature=completion.temperature,
        shaping=() if shaping is None else (ShapedSpan(before, before + count, shaping),),
        experts=completion.experts,
        support=None
        if completion.support is None
        else Support.join(
            [Support.unrecorded(before, completion.support.vocab), completion.support]
        ),
        adapter=completion.adapter,
    )


@dataclass
class Result:
    """The events of one request, and their combined result."""

    handle: RequestHandle
    events: list[Event] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return any(isinstance(event, list | LockstepError) for event in self.events)

    @property
    def error(self) -> LockstepError | None:
        return next((e for e in self.events if isinstance(e, LockstepError)), None)

    @property
    def completions(self) -> list[Completion]:
        if self.error is not None:
            raise self.error
        return next(e for e in self.events if isinstance(e, list))

    @property
    def one(self) -> Completion:
        (only,) = self.completions
        return only

    @property
    def pieces(self) -> list[StreamedToken]:
        return [e for e in self.events if isinstance(e, StreamedToken)]

    @property
    def tokens_so_far(self) -> list[int]:
        return self.handle.sequences[0].output_ids


class Rig:
    def __init__(self, directory: Path, **options: Any) -> None:
        small = {"max_model_len": 1024, "max_seqs": 8, "max_batch_tokens": 128,
                 "prefix_cache_bytes": 4 << 20, "logprob_mode": "raw"}  # fmt: skip
        self.directory = directory
        self.core = Core(directory, EngineOptions(**(small | options)))

    def submit(self, prompt: list[int], *, stream: bool = False, **options: Any) -> Result:
        result = Result(RequestHandle(request(prompt, **options), lambda _: None, stream=stream))
        result.handle.deliver = result.events.append
        self.core.submit(result.handle)
        return result

    def run(self, steps: int = 10_000) -> None:
        """Step until there is nothing to do, or `steps` times."""
        while steps and self.core.has_work:
            self.core.step()
            steps -= 1

    def generate(self, prompt: list[int], **options: Any) -> Completion:
        """Return the single completion of a request, after running the engine until it is idle."""
        result = self.submit(prompt, **options)
        self.run()
        return result.one

    def pause(self, mode: PauseMode) -> list[LockstepError | None]:
        """Pause the engine. The returned list gets an entry once the engine is quiet."""
        quiet: list[LockstepError | None] = []
        self.core.pause(mode, quiet.append)
        return quiet

    def load(self, directory: Path, version: str) -> None:
        self.core.commit(self.core.served.load_weights(directory, version))

    def adopt(self, name: str, path: Path, label: str | None = None) -> bool:
        return self.core.served.add_adapter(self.core.served.load_adapter(name, path, label))

    def forget_prefixes(self) -> None:
        self.core.prefixes.clear()

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        scheduler = self.core.scheduler
        return not (self.core.handles or scheduler.running or scheduler.has_waiting)
