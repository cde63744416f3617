"""Finds the first point where two runs differ: digests first, then the values behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.chain.records import Chain, Record
from lockstep.replay.contents_difference import GROUP_KINDS, first_in_contents
from lockstep.replay.sources import RunSource, open_run
from lockstep.replay.tensor_difference import file_digests, first_element
from lockstep.replay.verification import (
    UNREADABLE,
    chain_problems,
    checkpoint_problems,
    content_digests,
)
from lockstep.tokens.errors import LockstepError
from lockstep.train.config import TrainConfig
from lockstep.train.records.run_dir import RunDirectory

TENSOR_KINDS = ("gradients", "optimizer", "weights")
_SAMPLES = ("token_ids", "versions", "logprobs", "routes", "supports", "tokens_by_version")
_BATCH = ("dropped", "order", "advantages", "masks", "teacher", "packing")
KINDS = {
    "numbers of the tasks": "numbers",
    "tasks": "tasks",
    "seeds": "seeds",
    **{name: f"samples.{name}" for name in _SAMPLES},
    "rewards": "rewards",
    "late samples": "late",
    **{f"batch {name}": f"batch.{name}" for name in _BATCH},
    **{name: f"learning.{name}" for name in ("metrics", *TENSOR_KINDS)},
}
"""Where a record has each kind of value, causes before effects."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """One value that two runs do not share: its kind, its place, and what each run has."""

    what: str
    where: str
    a: Any
    b: Any

    def lines(self) -> Iterator[str]:
        """Yield the value as a diff."""
        yield f"@@ {self.where}: {self.what} @@" if self.where else f"@@ {self.what} @@"
        yield f"- {_text(self.a)}"
        yield f"+ {_text(self.b)}"


@dataclass(slots=True)
class Bisection:
    """The outcome of a comparison of two runs.

    `conditions` are differences before the first step: configuration, code, model, arithmetic.
    `first` is the first difference in a step, and `also` names what else differs in that step.
    `problems` say what in one of the runs is not as it was recorded.
    """

    run_a: str
    run_b: str
    head_a: str
    head_b: str
    steps_a: int
    steps_b: int
    conditions: list[Divergence] = field(default_factory=list)
    step: int | None = None
    first: Divergence | None = None
    also: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether no difference was found."""
        return not (self.conditions or self.first or self.problems)

    def summary(self) -> str:
        """Return the first difference in one sentence."""
        divergence = next(iter(self.conditions), self.first)
        if divergence is None:
            return "no difference"
        return f"{divergence.where}: {divergence.what}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.same}

    def lines(self) -> Iterator[str]:
        """Yield the outcome as a diff, for a person."""
        yield f"--- {self.run_a} ({self.steps_a} steps, head {self.head_a[:16]})"
        yield f"+++ {self.run_b} ({self.steps_b} steps, head {self.head_b[:16]})"
        for problem in self.problems:
            yield f"! {problem}"
        for condition in self.conditions:
            yield from condition.lines()
        if self.first is not None:
            yield from self.first.lines()
            if self.also:
                yield f"  In step {self.step} also differ: {', '.join(self.also)}."
        common = min(self.steps_a, self.steps_b)
        if self.same:
            yield f"  All {common} common steps are equal."
        elif self.first is None:
            yield f"  The records of all {common} common steps are equal."


def bisect(run_a: str | Path, run_b: str | Path) -> Bisection:
    """Find the first difference of two runs. Nothing is computed again.

        print(*bisect("runs/a", "runs/b").lines(), sep="\\n")

    Runs may be run directories or packs. Raises NotFound for a run without a chain.
    """
    with open_run(run_a) as a, open_run(run_b) as b:
        outcome = Bisection(
            a.name, b.name, a.chain.head, b.chain.head, len(a.chain.steps), len(b.chain.steps)
        )
        for source in (a, b):
            outcome.problems += [f"{source.name}: {own}" for own in _problems(source)]
        outcome.conditions += _conditions(a, b)
        for step in sorted(a.chain.steps.keys() & b.chain.steps.keys()):
            outcome.conditions += _resume(a.chain, b.chain, step)
            differing = _differing(*_records(a.chain, b.chain, step))
            if differing:
                outcome.step = step
                outcome.first = _locate(a, b, step, differing[0])
                outcome.also = differing[1:]
                break
            outcome.conditions += _checkpoints(a, b, step)
        return outcome


def _problems(source: RunSource) -> list[str]:
    problems = chain_problems(source.chain)
    return problems + (checkpoint_problems(source.chain) if source.reads_checkpoints else [])


# Before the first step


def _conditions(a: RunSource, b: RunSource) -> Iterator[Divergence]:
    first, second = a.chain.start, b.chain.start
    yield from _config(first, second, "configuration")
    yield from _entries("code", first.get("code", {}), second.get("code", {}))
    files = list(_entries("model file", first.get("model", {}), second.get("model", {})))
    yield from files
    if files or first.get("tensors", {}).get("sha256") != second.get("tensors", {}).get("sha256"):
        yield from _tensors(a, b, int(first["step"]), "weights", "before the first step")
    for side in ("trainer", "workers"):
        plans = [own.get("arithmetic", {}).get(side) or {} for own in (first, second)]
        yield from _entries(f"arithmetic of the {side}", *plans)


def _config(first: Record, second: Record, where: str) -> Iterator[Divergence]:
    """Yield the fields that decide what is learnt. The model is compared by its files."""
    try:
        fields = TrainConfig.of(second["config"]).differences(first["config"])
    except (LockstepError, KeyError):  # of another trainer, or of another version
        before, after = first.get("config", {}), second.get("config", {})
        fields = {
            name: (before.get(name), after.get(name))
            for name in sorted(before.keys() | after.keys())
            if before.get(name) != after.get(name)
        }
    for name, (before, after) in fields.items():
        if name != "model":
            yield Divergence(name, where, before, after)


def _entries(
    where: str, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[Divergence]:
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            yield Divergence(name, where, first.get(name), second.get(name))


def _resume(a: Chain, b: Chain, step: int) -> Iterator[Divergence]:
    """Yield what a resume before `step` changed in one run only."""
    changes = [
        {name: own for link in chain.links if link.kind == "resume" and link.step == step - 1
         for name, own in link.record.get("changes", {}).items()}
        for chain in (a, b)
    ]  # fmt: skip
    yield from _entries(f"resumed after step {step - 1}", *changes)


# The first step that differs


def _records(a: Chain, b: Chain, step: int) -> tuple[Record, Record]:
    """Return the records of a step. Where the files they name differ, digests are those of the
    files: a record may be older than an alteration of its file.
    """
    first, second = a.steps[step], b.steps[step]
    data = [_data(a, first), _data(b, second)]
    if data[0] == data[1] or None in data:
        return first, second
    return _with_digests(first, data[0]), _with_digests(second, data[1])


def _data(chain: Chain, record: Record) -> bytes | None:
    try:
        return chain.file_bytes(record["file"])
    except (LockstepError, KeyError):  # a problem of the run, or a trainer without such a file
        return None


def _with_digests(record: Record, data: bytes | None) -> Record:
    try:
        contents = json.loads(data or b"")
        return {**record, **content_digests(contents)}
    except UNREADABLE:
        return record


def _differing(a: Record, b: Record) -> list[str]:
    """Return the kinds in which two records of a step differ, causes before effects."""
    return [name for name, path in KINDS.items() if _value(a, path) != _value(b, path)]


def _value(record: Record, path: str) -> Any:
    section, _, key = path.partition(".")
    value = record.get(section)
    if not key:
        return value
    value = None if value is None else value.get(key)
    # Labels may have the suffix of a run; their steps and counts are the schedule.
    if key == "tokens_by_version" and value is not None:
        return sorted((own["step"], own["tokens"]) for own in value.values())
    return value


def _locate(a: RunSource, b: RunSource, step: int, kind: str) -> Divergence:
    """Return the first value behind two digests that differ."""
    first, second = a.chain.steps[step], b.chain.steps[step]
    where = f"step {step}"
    if kind in GROUP_KINDS and "file" in first and "file" in second:
        contents = [
            json.loads(source.chain.file_bytes(source.chain.steps[step]["file"]))
            for source in (a, b)
        ]
        value = first_in_contents(kind, *contents)
        if value is not None:
            return Divergence(value.what, f"{where}, {value.where}", value.a, value.b)
    if kind == "metrics":
        own = [_value(record, KINDS[kind]) or {} for record in (first, second)]
        for entry in _entries(where, *own):
            return entry
    if kind in TENSOR_KINDS:
        for entry in _tensors(a, b, step, kind, where):
            return entry
    return Divergence(kind, where, _value(first, KINDS[kind]), _value(second, KINDS[kind]))


def _checkpoints(a: RunSource, b: RunSource, step: int) -> Iterator[Divergence]:
    """Yield where the kept weights of a step differ though their records are equal."""
    paths = [RunDirectory(source.chain.directory).checkpoint(step) for source in (a, b)]
    if not (a.reads_checkpoints and b.reads_checkpoints and all(own.is_dir() for own in paths)):
        return
    digests = [file_digests(path) for path in paths]
    for name, digest in digests[0].items():
        other = digests[1].get(name)
        element = first_element(name, (paths[0], digest), (paths[1], other))
        if element is not None:
            where = f"checkpoint of step {step}, {name}"
            yield Divergence(f"element {element.index}", where, element.a, element.b)
            return


def _tensors(a: RunSource, b: RunSource, step: int, kind: str, where: str) -> Iterator[Divergence]:
    """Yield the first tensor that differs, with its first element where both runs still have it."""
    digests = []
    for source in (a, b):
        chain = source.chain
        record = (chain.steps[step].get("learning") or {}) if step in chain.steps else chain.start
        try:
            digests.append(source.chain.contents(record["tensors"])[kind])
        except (LockstepError, KeyError):  # reported as a problem of the run
            return
    first, second = digests
    names = [name for name in first if first[name] != second.get(name)]
    if not names:
        return
    place = f"{where}, {kind}, {names[0]} ({len(names)} of {len(first)} tensors)"
    if kind == "weights":
        tensor = names[0]
        element = first_element(
            tensor, (_weights(a, step), first[tensor]), (_weights(b, step), second.get(tensor))
        )
        if element is not None:
            yield Divergence(f"element {element.index}", place, element.a, element.b)
            return
    yield Divergence("digest", place, first[names[0]], second.get(names[0], "no such tensor"))


def _weights(source: RunSource, step: int) -> Path:
    """Return the directory that holds the weights of a step, if it is still there."""
    if step and source.reads_checkpoints:
        return RunDirectory(source.chain.directory).checkpoint(step)
    return source.model_directory


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
