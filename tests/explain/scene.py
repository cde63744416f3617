"""What faults are injected into: models, prompts, and rollouts on a real embedded engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.engine import Engine, EngineOptions, EngineRequest
from lockstep.explain.case import Case
from lockstep.explain.explainer import Explainer
from lockstep.explain.explanation import Explanation
from lockstep.explain.scorer import Scorer
from lockstep.models import model_directory
from lockstep.render import Renderer
from lockstep.tokens import Completion, Sample, Sampling, ShapedSpan, Support, VersionSpan
from tests.engine import checkpoints

TURNS = 2
PROMPTS = 5
TOKENS = 20


@cache
def _renderer() -> Renderer:
    return Renderer.load("tiny")


def prompts(count: int = PROMPTS, seed: int = 0) -> list[list[int]]:
    """Return prompts of different lengths, rendered with the tiny model's template."""
    rng = random.Random(seed)
    messages = [
        [{"role": "user", "content": f"Reverse: {rng.randrange(10 ** (3 + 4 * (at % 5)))}"}]
        for at in range(count)
    ]
    return [_renderer().render(each) for each in messages]


def follow_up(at: int) -> list[int]:
    """Return the ids between two turns: the end of the first, another message."""
    rendered = _renderer().render([{"role": "user", "content": f"Once more: {at * 7919}"}])
    return [505, *rendered]


@dataclass(kw_only=True)
class Scene:
    """Weights before and after an update, and what a fault may change before the rollout.

    `served` is the model directory of the engine, `options` its options, `sampling` what is
    requested. Tokens are labelled "new", as if the engine had been updated.
    """

    old: Path
    new: Path
    scratch: Path
    served: Path = field(init=False)
    options: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    adapter: Path | None = None
    sabotage: Callable[[Engine], None] = lambda _: None
    """Changes the running engine before the rollout."""

    def __post_init__(self) -> None:
        self.served = self.new

    def engine(self, directory: Path | None = None) -> Engine:
        small = {"max_model_len": 512, "max_seqs": 8, "prefix_cache_bytes": 8 << 20}
        return Engine(directory or self.served, EngineOptions(**(small | self.options)))

    def rollout(self, **how: Any) -> list[Sample]:
        """Sample two-turn conversations on an engine and return their samples."""
        return asyncio.run(_rollout(self, **how))

    def case(self, samples: Sequence[Sample], **what: Any) -> Case:
        """Return the case of samples that should come from the new weights."""
        known: dict[str, Any] = {
            "checkpoint": self.new, "others": (("", self.old),), "adapter": self.adapter,
            "tokenizer": model_directory("tiny"),
        }  # fmt: skip
        return Case(samples=samples, **(known | what))


async def _rollout(
    scene: Scene, *, turns: int = TURNS, tokens: int = TOKENS, choices: int = 2,
    count: int = PROMPTS, update_to: Path | None = None, keep_cache: bool = False, seed: int = 0,
    front: Sequence[int] = (), labels: Sequence[str] = ("new", "new"), **request: Any,
) -> list[Sample]:  # fmt: skip
    """Sample; with `update_to`, commit these weights before the last turn of each conversation.

    With `keep_cache`, the engine takes the keys and values of its old weights for those of the new.
    `front` is put before every prompt, and is not part of the samples.
    """
    async with scene.engine() as engine:
        scene.sabotage(engine)
        if scene.adapter is not None:
            await engine.load_adapter("lora", scene.adapter)
            request = {"adapter": "lora"} | request
        asked = {
            "max_tokens": tokens,
            "ignore_eos": True,
            "n": choices,
            "logprob_mode": "processed",
        }

        async def ask(prompt: list[int], number: int, **more: Any) -> list[Completion]:
            sampling = Sampling(**(asked | scene.sampling | more | {"seed": seed + number}))
            sent = EngineRequest(prompt_ids=[*front, *prompt], sampling=sampling, **request)
            return await engine.generate(sent)

        first = await asyncio.gather(
            *(ask(prompt, at) for at, prompt in enumerate(prompts(count, seed)))
        )
        histories = [(completion,) for group in first for completion in group]
        for turn in range(1, turns):
            if update_to is not None and turn == turns - 1:
                staged = await engine.stage(update_to, "updated")
                if keep_cache:
                    object.__setattr__(staged, "epoch", engine.core.served.weights.epoch)
                await engine.commit()
            joined = [
                [*done[-1].prompt_ids[len(front) :], *done[-1].token_ids, *follow_up(at)]
                for at, done in enumerate(histories)
            ]
            later = await asyncio.gather(
                *(ask(ids, 100 * turn + at, n=1) for at, ids in enumerate(joined))
            )
            histories = [(*done, *own) for done, own in zip(histories, later, strict=True)]
        return [conversation(done, labels, len(front)) for done in histories]


def conversation(turns: Sequence[Completion], labels: Sequence[str], front: int = 0) -> Sample:
    """Return the sample of completions that continue each other, without their first tokens."""
    last = turns[-1]
    ids = [*last.prompt_ids[front:], *last.token_ids]
    mask, logprobs = [False] * len(ids), [0.0] * len(ids)
    versions, shaping, supports = [], [], []
    at = 0
    for done, label in zip(turns, labels, strict=False):
        start = len(done.prompt_ids) - front
        end = start + len(done.token_ids)
        mask[start:end] = [True] * (end - start)
        logprobs[start:end] = done.logprobs
        versions.append(VersionSpan(label, start, end))
        if done.shaping is not None:
            shaping.append(ShapedSpan(start, end, done.shaping))
        if done.support is not None:
            supports += [Support.unrecorded(start - at, done.support.vocab), done.support]
            at = end
    return Sample(
        token_ids=ids, sampled_mask=mask, logprobs=logprobs, versions=tuple(versions),
        logprob_mode=last.logprob_mode, temperature=last.temperature, shaping=tuple(shaping),
        support=Support.join(supports) if len(supports) == 2 * len(turns) else None,
        adapter=last.adapter, experts=last.experts if not front else None,
    )  # fmt: skip


def relabel(samples: Sequence[Sample], **changes: Any) -> list[Sample]:
    """Return samples that claim something else about how they were sampled."""
    return [replace(sample, **changes) for sample in samples]


def mixed(new: Path, old: Path, target: Path, names: Sequence[str]) -> Path:
    """Write the new weights with the named tensors (by prefix) of the old ones."""
    ours, theirs = checkpoints.tensors_of(new), checkpoints.tensors_of(old)
    taken = {
        name: theirs[name] if any(name.startswith(each) for each in names) else tensor
        for name, tensor in ours.items()
    }
    return checkpoints.save(new, target, taken)


def verdict_of(case: Case, **options: Any) -> Explanation:
    return Explainer(case, Scorer(case, **options)).run()
