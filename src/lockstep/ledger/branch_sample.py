"""Conversion of a session's branches to training samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from lockstep.ledger.lineage import Branch, find_branches
from lockstep.ledger.tree import Node
from lockstep.tokens import RoutedExperts, Sample, ShapedSpan, Support, TrainedSpan, VersionSpan
from lockstep.tokens.errors import Conflict
from lockstep.tokens.lineage import check_kinds, check_weights, weighted

COMPARABLE = ("logprob_mode", "temperature", "adapter")
"""Values that all turns of a sample share: logprobs are not comparable across them."""


def branch_samples(
    nodes: Sequence[Node],
    *,
    train_aborted: bool,
    dedupe: bool,
    kinds: Iterable[str] | None = None,
    weights: str | None = None,
) -> list[Sample]:
    """Return the samples of a session's branches, given all its turns; see `find_branches`.

    A branch whose turns do not fit into one sample (`COMPARABLE`) is split: each part has the
    tokens up to its last turn and trains its own turns only. With `dedupe`, a branch trains its own
    turns but not those it continues from: `trained_in` names the sample that trains them. `kinds`
    selects branches by kind. A discarded attempt is masked unless `kinds` includes `retry`.
    `weights` is as in `weighted`. Raises BadRequest for unknown kinds and weights.
    """
    wanted, way = check_kinds(kinds), check_weights(weights)
    samples: list[Sample] = []
    trained: dict[int, _Trained] = {}
    for branch in find_branches(nodes):
        if wanted is not None and branch.kind not in wanted:
            continue
        end = branch.last
        for part in _parts(end.path()):
            turns = part.trained_turns(train_aborted)
            if branch.kind == "retry" and wanted is None:
                turns = [turn for turn in turns if turn.index < branch.number]
            own = turns
            if dedupe:
                own = [turn for turn in turns if branch.owns(turn) and not _is_in(trained, turn)]
            if dedupe and not own and part.path[-1] is not end:
                continue  # an inner part, which belongs to the previous branch
            samples.append(_sample(part, turns, own, trained, branch))
            for turn in own:
                _note(trained, turn, _Trained(len(samples) - 1, len(turn.sampled)))
    return weighted(samples, way)


def left_out(nodes: Sequence[Node], kinds: Iterable[str] | None) -> dict[str, int]:
    """Return how many trainable tokens the branches have that a selection of kinds leaves out, by
    their kind. Raises BadRequest for unknown kinds."""
    wanted = check_kinds(kinds)
    counts: Counter[str] = Counter()
    for branch in find_branches(nodes) if wanted is not None else ():
        if wanted is not None and branch.kind not in wanted:
            counts[branch.kind] += sum(len(turn.sampled) for turn in trained_turns(branch))
    return {kind: tokens for kind, tokens in counts.items() if tokens}


class _Trained(NamedTuple):
    """The sample that trains a turn, and how many of its first tokens."""

    sample: int
    tokens: int


def _is_in(trained: Mapping[int, _Trained], turn: Node) -> bool:
    return turn.index in trained or turn.kept_of in trained


def _note(trained: dict[int, _Trained], turn: Node, where: _Trained) -> None:
    """Record that a turn is trained, and with a part of a cut turn the tokens of that one."""
    trained.setdefault(turn.index, where)
    if turn.kept_of is not None:
        trained.setdefault(turn.kept_of, where)


def _trained_in(part: _Part, trained: Mapping[int, _Trained]) -> Iterator[TrainedSpan]:
    for node in part.own:
        where = trained.get(node.index) or trained.get(-1 if node.kept_of is None else node.kept_of)
        if where is not None and len(node.sampled):
            end = node.sampled_start + min(where.tokens, len(node.sampled))
            yield TrainedSpan(where.sample, node.sampled_start, end)


def trained_turns(branch: Branch) -> list[Node]:
    """Return the turns that the samples of a branch train by default, each in one of them."""
    if branch.kind == "retry":
        return []
    return [
        turn
        for part in _parts(branch.last.path())
        for turn in part.trained_turns(train_aborted=False)
        if branch.owns(turn)
    ]


def branch_sample(path: Sequence[Node], *, train_aborted: bool) -> Sample:
    """Return the one sample of a branch, given its turns from the root on.

    Raises Conflict if they mix logprob modes, temperatures or adapters.
    """
    first = path[0]
    for node in path:
        for name in COMPARABLE:
            if (value := getattr(node, name)) != (expected := getattr(first, name)):
                raise Conflict(
                    f"turn {node.index} has {name} {value!r}, turn {first.index} before it "
                    f"{expected!r}: one sample cannot hold both; `samples` gives one for each",
                    param=name,
                )
    part = _Part(path, path, (), path[-1])
    turns = part.trained_turns(train_aborted)
    return _sample(part, turns, turns, {})


def check_comparable(parent: Node | None, **values: object) -> None:
    """Raise Conflict if a turn with these values could not share a sample with its parent.

    For strict sessions, which reject such a turn before sampling. None is not compared.
    """
    for name, value in values.items():
        if parent is not None and value is not None and getattr(parent, name) != value:
            raise Conflict(
                f"{name} is {value!r}, but the turns before have {getattr(parent, name)!r}: one "
                "sample cannot hold both; keep it the same, or allow branches with breaks='fork'",
                param=name,
            )


@dataclass(frozen=True, slots=True)
class _Part:
    """Turns of a branch that fit into one sample: `own`, and the path up to the last of them.

    `leaf` is the last turn of the branch.
    """

    path: Sequence[Node]
    own: Sequence[Node]
    split: tuple[str, ...]
    leaf: Node

    def aborted_turns(self) -> list[Node]:
        """Return the aborted turn that nothing follows, if any; a continued one is trained."""
        return [node for node in self.own if node.finish == "abort" and node is self.leaf]

    def trained_turns(self, train_aborted: bool) -> list[Node]:
        aborted = () if train_aborted else {node.index for node in self.aborted_turns()}
        return [node for node in self.own if node.index not in aborted]


def _parts(path: Sequence[Node]) -> list[_Part]:
    by_key: dict[tuple[object, ...], list[int]] = {}
    for at, node in enumerate(path):
        by_key.setdefault(tuple(getattr(node, name) for name in COMPARABLE), []).append(at)
    split = tuple(
        name for at, name in enumerate(COMPARABLE) if len({key[at] for key in by_key}) > 1
    )
    return [
        _Part(path[: at[-1] + 1], [path[position] for position in at], split, path[-1])
        for at in by_key.values()
    ]


def _sample(
    part: _Part,
    turns: Sequence[Node],
    own: Sequence[Node],
    trained: Mapping[int, _Trained],
    branch: Branch | None = None,
) -> Sample:
    """Return the sample of a part that trains its `own` turns; `trained` maps others to samples."""
    first, last = part.own[0], part.path[-1]
    ids: list[int] = []
    for node in part.path:
        ids += node.prompt
        ids += node.sampled
    mask, logprobs = [False] * len(ids), [0.0] * len(ids)
    versions: list[VersionSpan] = []
    for node in own:
        start, end = node.sampled_start, node.end
        mask[start:end] = [True] * (end - start)
        logprobs[start:end] = node.logprobs
        versions += [
            VersionSpan(span.version, start + span.start, start + span.end)
            for span in node.versions
        ]
    notes = dict.fromkeys(node.notes for node in part.own if node.notes)
    return Sample(
        token_ids=ids,
        sampled_mask=mask,
        logprobs=logprobs,
        versions=tuple(versions),
        logprob_mode=first.logprob_mode,
        temperature=first.temperature,
        experts=_joined([node.experts for node in part.path]),
        support=_support(part, own),
        adapter=first.adapter,
        breaks=last.breaks,
        aborts=len(part.aborted_turns()),
        workers=tuple(dict.fromkeys(node.worker for node in part.own if node.worker)),
        trained_in=tuple(_trained_in(part, trained)),
        split=part.split,
        shaping=tuple(
            ShapedSpan(node.sampled_start, node.end, node.shaping)
            for node in turns
            if node.shaping is not None and len(node.sampled)
        ),
        stops=tuple(
            (node.end - node.stop_tokens, node.end) for node in part.own if node.stop_tokens
        ),
        notes=tuple(msgspec.json.decode(note) for note in notes),
        tool_parse_errors=sum(node.tool_parse_error is not None for node in part.own),
        turn_index=last.index,
        **_lineage(branch),
    )


def _lineage(branch: Branch | None) -> dict[str, Any]:
    if branch is None:
        return {}
    return {
        "kind": branch.kind,
        "branch": branch.number,
        "parent": branch.parent,
        "depth": branch.depth,
        "harness": branch.harness or None,
        "evidence": branch.evidence,
    }


def _support(part: _Part, own: Sequence[Node]) -> Support | None:
    """Return the sets of the tokens that a part trains, or None if no turn recorded any."""
    trained = {node.index for node in own if node.support is not None}
    vocab = max((node.support.vocab for node in own if node.support is not None), default=0)
    if not trained:
        return None
    rows: list[Support] = []
    for node in part.path:
        if node.support is None or node.index not in trained:
            rows.append(Support.unrecorded(len(node.prompt) + len(node.sampled), vocab))
        else:
            rows += [Support.unrecorded(len(node.prompt), vocab), node.support]
    return Support.join(rows)


def _joined(parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
    rows = [part for part in parts if part is not None]
    if not rows:
        return None
    shape = (sum(part.rows for part in rows), *rows[0].shape[1:])
    return RoutedExperts(b"".join(part.data for part in rows), shape, rows[0].dtype)
