"""The contents of one step's record: its groups as JSON, and back; and digests of them by kind.

Digests by kind tell apart what two runs differ in, before the files themselves are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.chain.records import canonical, sha256
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion, RoutedExperts, Sample, Sampling
from lockstep.tokens.completion import VersionSpan
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.support import PackedSupport
from lockstep.train.envs.environment import Reward, Task
from lockstep.train.learning.batch import (
    Clock,
    Rollout,
    RolloutDraw,
    RolloutGroup,
    TeacherTop,
    TrainBatch,
    TrainItem,
)

Plain = dict[str, Any]
DEFAULTS = msgspec.to_builtins(Sampling())


def task_numbers(groups: Sequence[RolloutGroup], played: int) -> list[int]:
    """Return the position of each group's task among the tasks of the run.

    In async mode it is part of the seeds. In sync mode these were the last of `played` tasks.
    """
    numbers = []
    for at, group in enumerate(groups, start=played - len(groups)):
        match group.seeds:
            case (_, "async", int(number)):
                numbers.append(number)
            case _:
                numbers.append(at)
    return numbers


def encode_groups(
    groups: Sequence[RolloutGroup], batch: TrainBatch, clock: Clock, played: int
) -> Plain:
    """Return the groups of a step as `decode_groups` reads them."""
    labels = {span.version for sample in _samples(groups) for span in sample.versions}
    return {
        "groups": [
            {
                "number": number,
                "seeds": list(group.seeds),
                "task": encode_task(group.task),
                "rollouts": [_encode_rollout(rollout) for rollout in group.rollouts],
            }
            for number, group in zip(task_numbers(groups, played), groups, strict=True)
        ],
        "clock": {label: clock.steps[label] for label in sorted(labels)},
        "teacher": [item.teacher for item in batch.items]
        if any(item.teacher is not None for item in batch.items)
        else None,
        "teacher_top": [
            None if top is None else {"ids": top.ids.tolist(), "logprobs": top.logprobs.tolist()}
            for top in (item.teacher_top for item in batch.items)
        ]
        if any(item.teacher_top is not None for item in batch.items)
        else None,
    }


def decode_teacher_tops(contents: Plain) -> list[TeacherTop] | None:
    """Return the teacher's likeliest tokens of each item of a step; None if it had none."""
    tops = contents.get("teacher_top")
    if tops is None:
        return None
    return [
        TeacherTop(np.asarray(own["ids"], np.int64), np.asarray(own["logprobs"], np.float32))
        for own in tops
    ]


def decode_groups(contents: Plain) -> list[RolloutGroup]:
    """Return the groups of a step. Raises BadRequest for contents of another version."""
    try:
        return [
            RolloutGroup(
                tuple(_decode_rollout(rollout) for rollout in group["rollouts"]),
                seeds=tuple(group["seeds"]),
            )
            for group in contents["groups"]
        ]
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise BadRequest(
            f"the record of a step cannot be read ({error!r}): was it written by another version?",
            param="run",
        ) from None


def encode_task(task: Task | None) -> Any:
    """Return a task as JSON. A fact that JSON does not have is recorded by its type only."""
    return None if task is None else _plain(task)


def encode_reward(reward: Reward) -> Plain:
    return dict(_plain(reward))


def _plain(value: Any) -> Any:
    encoded = msgspec.json.encode(value, enc_hook=lambda own: type(own).__name__)
    return msgspec.json.decode(encoded)


def _encode_rollout(rollout: Rollout) -> Plain:
    return {
        "reward": encode_reward(rollout.reward),
        "breaks": rollout.breaks,
        "retries": rollout.retries,
        "samples": [msgspec.Raw(sample.to_json()) for sample in rollout.samples],
        "draws": [_encode_draw(draw, rollout.samples) for draw in rollout.draws],
    }


def _decode_rollout(plain: Plain) -> Rollout:
    samples = tuple(Sample.from_json(msgspec.json.encode(own)) for own in plain["samples"])
    return Rollout(
        reward=msgspec.convert(plain["reward"], Reward),
        samples=samples,
        breaks=plain["breaks"],
        retries=plain["retries"],
        draws=tuple(_decode_draw(draw, samples) for draw in plain["draws"]),
    )


# Draws. Their tokens are those of a sample, except for turns that no sample trains.


def _encode_draw(draw: RolloutDraw, samples: Sequence[Sample]) -> Plain:
    request, completion = draw.request, draw.completion
    prompt = list(request.prompt_ids)
    options = msgspec.to_builtins(request.sampling, str_keys=True)
    plain: Plain = {
        "sampling": {name: value for name, value in options.items() if value != DEFAULTS[name]},
        "experts_start": request.experts_start,
        "support": request.support,
        "finish": completion.finish,
        "stop_reason": completion.stop_reason,
        "worker": completion.worker,
        "adapter": completion.adapter,
    }
    at = _find(prompt, completion.token_ids, samples)
    if at is not None:
        return {**plain, "sample": at, "start": len(prompt), "count": len(completion.token_ids)}
    return {
        **plain,
        "prompt_ids": prompt,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "versions": msgspec.to_builtins(completion.versions),
    }


def _find(prompt: list[int], tokens: list[int], samples: Sequence[Sample]) -> int | None:
    """Return the index of the sample that trains these tokens after this prompt."""
    start, end = len(prompt), len(prompt) + len(tokens)
    for at, sample in enumerate(samples):
        if (
            sample.token_ids[start:end] == tokens
            and all(sample.sampled_mask[start:end])
            and sample.token_ids[:start] == prompt
        ):
            return at
    return None


def _decode_draw(plain: Plain, samples: Sequence[Sample]) -> RolloutDraw:
    sampling = msgspec.convert(plain["sampling"], Sampling, strict=False)
    experts = support = None
    if "sample" in plain:
        sample = samples[plain["sample"]]
        start, end = plain["start"], plain["start"] + plain["count"]
        prompt, tokens = sample.token_ids[:start], sample.token_ids[start:end]
        logprobs, mode = sample.logprobs[start:end], sample.logprob_mode
        versions = tuple(
            VersionSpan(span.version, max(span.start, start) - start, min(span.end, end) - start)
            for span in sample.versions
            if span.start < end and span.end > start
        )
        support = None if sample.support is None else sample.support.slice(start, end)
        experts = None if sample.experts is None else _first_rows(sample.experts, end)
    else:
        prompt, tokens, logprobs = plain["prompt_ids"], plain["token_ids"], plain["logprobs"]
        mode = sampling.logprob_mode or "processed"
        versions = msgspec.convert(plain["versions"], tuple[VersionSpan, ...])
    completion = Completion(
        token_ids=tokens, logprobs=logprobs, prompt_ids=prompt, finish=plain["finish"],
        versions=versions, logprob_mode=mode, temperature=sampling.temperature,
        stop_reason=plain["stop_reason"], worker=plain["worker"], adapter=plain["adapter"],
        experts=experts, support=support,
    )  # fmt: skip
    request = GenerateRequest(
        prompt_ids=prompt, sampling=sampling, experts_start=plain["experts_start"],
        support=plain["support"],
    )  # fmt: skip
    return RolloutDraw(request, completion)


def _first_rows(experts: RoutedExperts, total: int) -> RoutedExperts:
    """Return the rows of a sequence of `total` tokens."""
    rows = experts.numpy()[: max(total - 1 - experts.start, 0)]
    return RoutedExperts(rows.tobytes(), rows.shape, experts.dtype, experts.start)


# Digests


def sample_digests(groups: Sequence[RolloutGroup], clock: Clock) -> Plain:
    """Return counts and digests of the samples of a step, by kind, in the order of the groups."""
    samples = list(_samples(groups))
    steps = clock.steps
    spans = [
        [(span.start, span.end, steps[span.version]) for span in sample.versions]
        for sample in samples
    ]
    tokens: dict[str, int] = {}
    for sample in samples:
        for span in sample.versions:
            tokens[span.version] = tokens.get(span.version, 0) + span.end - span.start
    return {
        "count": len(samples),
        "longest": max((len(sample.token_ids) for sample in samples), default=0),
        "token_ids": digest_arrays((sample.token_ids for sample in samples), np.int64),
        "logprobs": digest_arrays((sample.logprobs for sample in samples), np.float64),
        "versions": sha256(canonical(spans)),
        "tokens_by_version": {
            label: {"step": steps[label], "tokens": count} for label, count in tokens.items()
        },
        "routes": _routes(samples),
        "supports": _supports(samples),
    }


def group_digests(contents: Plain) -> Plain:
    """Return digests of the tasks, seeds, rewards and draws of a step's contents."""
    groups = contents["groups"]
    rollouts = [rollout for group in groups for rollout in group["rollouts"]]
    return {
        "numbers": [group["number"] for group in groups],
        "tasks": sha256(canonical([group["task"] for group in groups])),
        "seeds": sha256(
            canonical(
                [
                    [group["seeds"] for group in groups],
                    [[draw["sampling"] for draw in own["draws"]] for own in rollouts],
                ]
            )
        ),
        "rewards": sha256(canonical([rollout["reward"] for rollout in rollouts])),
    }


def batch_digests(batch: TrainBatch, passes: Sequence[Sequence[int]]) -> Plain:
    """Return what a step learns from: items in order, advantages, masks, and their packing."""
    return {
        "items": len(batch.items),
        "learnt_tokens": batch.learnt_tokens,
        "dropped": batch.dropped,
        "order": digest_arrays((item.sample.token_ids for item in batch.items), np.int64),
        "advantages": digest_arrays([[item.advantage for item in batch.items]], np.float64),
        "masks": digest_arrays((item.learn_T for item in batch.items), np.bool_),
        "teacher": digest_arrays((_teacher_row(item) for item in batch.items), np.float64),
        "packing": sha256(canonical([list(own) for own in passes])),
        "passes": len(passes),
    }


def _teacher_row(item: TrainItem) -> Sequence[float] | np.ndarray[Any, Any]:
    """Return all numbers that an item has from the teacher."""
    if item.teacher_top is None:
        return item.teacher or []
    return np.concatenate((item.teacher_top.ids.ravel(), item.teacher_top.logprobs.ravel()))


def _samples(groups: Sequence[RolloutGroup]) -> Iterable[Sample]:
    return (sample for group in groups for rollout in group.rollouts for sample in rollout.samples)


def digest_arrays(
    rows: Iterable[Sequence[Any] | np.ndarray[Any, Any]], dtype: npt.DTypeLike
) -> str:
    """Return the digest of rows of numbers: their lengths, then their bytes."""
    arrays: list[np.ndarray[Any, Any]] = [np.asarray(row, dtype=dtype) for row in rows]
    digest = hashlib.sha256(np.asarray([array.size for array in arrays], np.int64).tobytes())
    digest.update(np.concatenate(arrays).tobytes() if arrays else b"")
    return digest.hexdigest()


def _routes(samples: Sequence[Sample]) -> str | None:
    digest, recorded = hashlib.sha256(), False
    for sample in samples:
        if (experts := sample.experts) is not None:
            recorded = True
            digest.update(f"{experts.shape} {experts.dtype} {experts.start}\0".encode())
            digest.update(experts.data)
        digest.update(b"\1")
    return digest.hexdigest() if recorded else None


def _supports(samples: Sequence[Sample]) -> str | None:
    if all(sample.support is None for sample in samples):
        return None
    packed = [None if own.support is None else PackedSupport.of(own.support) for own in samples]
    return sha256(msgspec.json.encode(packed))
