"""The first difference of two steps within their groups: task, seed, token, reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lockstep.chain.records import canonical

Plain = Mapping[str, Any]
GROUP_KINDS = (
    "tasks", "seeds", "token_ids", "versions", "logprobs", "routes", "supports", "rewards",
    "tokens_by_version",
)  # fmt: skip
"""Kinds of digests whose values are in the file of a step."""
SAMPLE_KEYS = {"logprobs": "logprobs", "routes": "experts", "supports": "support"}


@dataclass(frozen=True, slots=True)
class Found:
    """A value that two steps do not share, and its place."""

    what: str
    where: str
    a: Any
    b: Any


def first_in_contents(kind: str, a: Plain, b: Plain) -> Found | None:
    """Return the first value of this kind that differs; None if the contents have none."""
    if len(a["groups"]) != len(b["groups"]):
        return Found("number of groups", "", len(a["groups"]), len(b["groups"]))
    search = {"tasks": _task, "seeds": _seed, "rewards": _reward}.get(kind)
    if search is not None:
        return next(search(a, b), None)
    if kind == "token_ids":
        return next(_tokens(a, b), None)
    if kind in ("versions", "tokens_by_version"):
        return next(_versions(a, b), None)
    return next(_sample_values(kind, a, b), None)


def _task(a: Plain, b: Plain) -> Iterator[Found]:
    for at, (first, second) in enumerate(_groups(a, b)):
        if first["task"] != second["task"]:
            elsewhere = _index(b["groups"], "task", first["task"])
            moved = "" if elsewhere is None else f", at group {elsewhere} in the other run"
            yield Found(f"task{moved}", f"group {at}", first["task"], second["task"])


def _seed(a: Plain, b: Plain) -> Iterator[Found]:
    for at, (first, second) in enumerate(_groups(a, b)):
        if first["seeds"] != second["seeds"]:
            yield Found("seeds", f"group {at}", first["seeds"], second["seeds"])
    for where, first, second in _rollouts(a, b):
        for turn, draws in enumerate(zip_longest(first["draws"], second["draws"])):
            options = [None if draw is None else draw["sampling"] for draw in draws]
            if options[0] != options[1]:
                yield Found("sampling options", f"{where}, turn {turn}", *options)


def _reward(a: Plain, b: Plain) -> Iterator[Found]:
    for where, first, second in _rollouts(a, b):
        before, after = first["reward"], second["reward"]
        if before["value"] != after["value"]:
            yield Found("reward", where, before["value"], after["value"])
        elif before != after:
            yield Found("reward", where, before, after)


def _tokens(a: Plain, b: Plain) -> Iterator[Found]:
    """Yield samples that differ, with their first differing token, or as swapped."""
    for where, first, second in _samples(a, b):
        before, after = _ids(first), _ids(second)
        if before == after:
            continue
        pairs = zip(before, after, strict=False)
        shorter = min(len(before), len(after))
        at = next((at for at, (x, y) in enumerate(pairs) if x != y), shorter)
        values = [ids[at] if at < len(ids) else "no token" for ids in (before, after)]
        source = second if at < len(after) else first
        sampled = source is not None and source["sampled_mask"][at]
        kind = "sampled token" if sampled else "token of the prompt"
        if other := _place_of(b, first):
            kind += f" (this sample is at {other} in the other run)"
        yield Found(kind, f"{where}, token {at}", *values)


def _versions(a: Plain, b: Plain) -> Iterator[Found]:
    """Yield samples whose tokens were sampled under weights of other steps."""
    for where, first, second in _samples(a, b):
        spans = [
            [[own["start"], own["end"], contents["clock"].get(own["version"])]
             for own in (sample or {}).get("versions", ())]
            for contents, sample in ((a, first), (b, second))
        ]  # fmt: skip
        if spans[0] != spans[1]:
            yield Found("step of the weights of its tokens (from, to, step)", where, *spans)


def _sample_values(kind: str, a: Plain, b: Plain) -> Iterator[Found]:
    key = SAMPLE_KEYS[kind]
    for where, first, second in _samples(a, b):
        before, after = (first or {}).get(key), (second or {}).get(key)
        if isinstance(before, list) and isinstance(after, list):
            for at, (x, y) in enumerate(zip(before, after, strict=False)):
                if x != y:
                    yield Found(kind.removesuffix("s"), f"{where}, token {at}", x, y)
        if before != after:
            yield Found(kind, where, before, after)


# Walking through two steps


def _groups(a: Plain, b: Plain) -> Iterator[tuple[Plain, Plain]]:
    yield from zip(a["groups"], b["groups"], strict=True)


def _rollouts(a: Plain, b: Plain) -> Iterator[tuple[str, Plain, Plain]]:
    for at, (first, second) in enumerate(_groups(a, b)):
        pairs = zip(first["rollouts"], second["rollouts"], strict=False)
        for number, (before, after) in enumerate(pairs):
            yield f"group {at}, rollout {number}", before, after


def _samples(a: Plain, b: Plain) -> Iterator[tuple[str, Plain | None, Plain | None]]:
    for where, first, second in _rollouts(a, b):
        pairs = list(zip_longest(first["samples"], second["samples"]))
        for number, (before, after) in enumerate(pairs):
            yield where if len(pairs) == 1 else f"{where}, sample {number}", before, after


def _ids(sample: Plain | None) -> list[int]:
    return [] if sample is None else list(sample["token_ids"])


def _index(groups: Any, key: str, value: Any) -> int | None:
    digest = canonical(value)
    return next((at for at, own in enumerate(groups) if canonical(own[key]) == digest), None)


def _place_of(contents: Plain, sample: Plain | None) -> str | None:
    """Return where a sample is in the other run, if it is there."""
    ids = _ids(sample)
    for where, own, _ in _samples(contents, contents):
        if ids and _ids(own) == ids:
            return where
    return None
