"""Samples from files: our own, and rollouts of other programs, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lockstep.export.exported import is_run, samples_of_run
from lockstep.tokens import Sample, VersionSpan
from lockstep.tokens.errors import BadRequest, LockstepError

PROMPT = ("prompt_token_ids", "prompt_ids", "prompt_tokens")
COMPLETION = ("completion_token_ids", "completion_ids", "response_ids", "completion_tokens",
              "response_tokens", "token_ids")  # fmt: skip
LOGPROBS = ("completion_logprobs", "per_token_logps", "sampling_logprobs", "response_logprobs",
            "logprobs", "rollout_logprobs")  # fmt: skip
MASK = ("completion_mask", "response_mask", "tool_mask")
NESTED = ("turns", "steps", "trajectory", "trajectories")
"""Fields whose last element holds the whole conversation, or each element one turn of it."""


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a run directory or of a file of JSON lines.

    Lines may be `Sample.to_json`, traces of verifiers and OpenEnv, and rollouts of prime-rl, TRL
    and rllm: objects with the ids of prompt and completion, and a logprob per completion token.
    Raises BadRequest that names the line.
    """
    if is_run(path):
        return [exported.sample for exported in samples_of_run(path)]
    if not path.is_file():
        raise BadRequest(
            f"{path} is neither a file of JSON lines nor a run directory", param="samples"
        )
    samples: list[Sample] = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                samples += _of_line(line)
            except (KeyError, TypeError, ValueError, msgspec.MsgspecError, LockstepError) as error:
                raise BadRequest(
                    f"line {number} of {path} is not a sample: {error}", param="samples"
                ) from None
    return samples


def _of_line(line: bytes) -> list[Sample]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    if "sampled_mask" in value:
        return [Sample.from_json(line)]
    if isinstance(value.get("nodes"), list):
        return [_of_nodes(value)]
    for name in NESTED:
        if isinstance(value.get(name), list) and value[name]:
            return _of_turns(value[name])
    return [_of_rollout(value)]


def _of_nodes(trace: dict[str, Any]) -> Sample:
    """Return the sample of a trace of verifiers with one branch."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for node in trace["nodes"]:
        own = list(node["token_ids"])
        sampled = [bool(flag) and bool(node.get("sampled", True)) for flag in node["mask"]]
        values = list(node.get("logprobs") or [])
        if len(values) == sum(sampled):
            rest = iter(values)
            values = [next(rest) if flag else 0.0 for flag in sampled]
        ids += own
        mask += sampled
        logprobs += values if any(sampled) else [0.0] * len(own)
    info = trace.get("info") or {}
    return _sample(ids, mask, logprobs, info)


def _of_turns(turns: Sequence[dict[str, Any]]) -> list[Sample]:
    """Return a sample for each chain of turns that continue each other."""
    if any(not _find(turn, COMPLETION) for turn in turns):
        return [sample for turn in turns for sample in _of_line(json.dumps(turn).encode())]
    samples: list[Sample] = []
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for turn in turns:
        prompt, completion, values = _parts(turn)
        if ids and prompt[: len(ids)] != ids:
            samples.append(_sample(ids, mask, logprobs, turn))
            ids, mask, logprobs = [], [], []
        more = len(prompt) - len(ids)
        ids = [*prompt, *completion]
        mask = [*mask, *[False] * more, *[True] * len(completion)]
        logprobs = [*logprobs, *[0.0] * more, *values]
    return [*samples, _sample(ids, mask, logprobs, turns[-1])]


def _of_rollout(value: dict[str, Any]) -> Sample:
    prompt, completion, logprobs = _parts(value)
    flags = _find(value, MASK)
    mask = [bool(flag) for flag in flags] if flags else [True] * len(completion)
    values = [number if sampled else 0.0 for number, sampled in zip(logprobs, mask, strict=True)]
    return _sample(
        [*prompt, *completion], [False] * len(prompt) + mask, [0.0] * len(prompt) + values, value
    )


def _parts(value: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    prompt, completion, logprobs = (_find(value, names) for names in (PROMPT, COMPLETION, LOGPROBS))
    if prompt is None or completion is None or logprobs is None:
        missing = [
            " or ".join(names[:3])
            for names, values in ((PROMPT, prompt), (COMPLETION, completion), (LOGPROBS, logprobs))
            if values is None
        ]
        raise KeyError(f"it has no {', no '.join(missing)}")
    if len(logprobs) != len(completion):
        raise ValueError(f"{len(completion)} completion tokens but {len(logprobs)} logprobs")
    return list(prompt), list(completion), [float(number) for number in logprobs]


def _find(value: dict[str, Any], names: Sequence[str]) -> list[Any] | None:
    for name in names:
        if isinstance(value.get(name), list):
            values: list[Any] = value[name]
            return values
    return None


def _sample(
    ids: list[int], mask: list[bool], logprobs: list[float], about: dict[str, Any]
) -> Sample:
    version = str(about.get("weight_version") or about.get("version") or "unknown")
    heat = about.get("temperature")
    if heat is None:
        heat = (about.get("metadata") or {}).get("temperature")
    versions = []
    start: int | None = None
    for at, sampled in enumerate([*mask, False]):
        if sampled and start is None:
            start = at
        elif not sampled and start is not None:
            versions.append(VersionSpan(version, start, at))
            start = None
    return Sample(
        token_ids=ids, sampled_mask=mask, logprobs=logprobs, versions=tuple(versions),
        logprob_mode="raw" if heat is None else about.get("logprob_mode", "processed"),
        temperature=1.0 if heat is None else float(heat),
    )  # fmt: skip
