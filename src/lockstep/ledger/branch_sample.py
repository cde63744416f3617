"""Turns one branch of a session into the sample that a trainer learns from."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.ledger.tree import Node
from lockstep.tokens import RoutedExperts, Sample, VersionSpan
from lockstep.tokens.errors import BadExperts, Conflict

COMPARABLE = ("logprob_mode", "temperature", "adapter")


def branch_sample(path: Sequence[Node], *, train_aborted: bool) -> Sample:
    """The sample of the turns of one branch, from the root on.

    Raises Conflict when they mix logprob modes, temperatures or adapters: such numbers are not
    comparable, and no trainer can tell them apart afterwards.
    """
    first = path[0]
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    aborts = 0
    for at, node in enumerate(path):
        for field in COMPARABLE:
            if (value := getattr(node, field)) != (expected := getattr(first, field)):
                raise Conflict(
                    f"turn {node.index} has {field} {value!r}, turn {first.index} before it "
                    f"{expected!r}: a sample must not mix them",
                    param=field,
                )
        # What a continuation resumed is part of its turn: only what nobody resumed is masked.
        resumed = at + 1 < len(path) and path[at + 1].continues
        aborted = node.finish == "abort" and not resumed
        aborts += aborted
        trained = train_aborted or not aborted
        ids += node.prompt
        ids += node.sampled
        mask += [False] * len(node.prompt) + [trained] * len(node.sampled)
        logprobs += [0.0] * len(node.prompt)
        logprobs += node.logprobs if trained else [0.0] * len(node.sampled)
        if trained:
            start = node.sampled_start
            versions += [
                VersionSpan(span.version, start + span.start, start + span.end)
                for span in node.versions
            ]
    return Sample(
        token_ids=ids,
        sampled_mask=mask,
        logprobs=logprobs,
        versions=tuple(versions),
        logprob_mode=first.logprob_mode,
        temperature=first.temperature,
        experts=_joined([node.experts for node in path]),
        adapter=first.adapter,
        breaks=path[-1].breaks,
        aborts=aborts,
        workers=tuple(dict.fromkeys(node.worker for node in path if node.worker)),
    )


def own_experts(
    parent: Node | None, experts: RoutedExperts | None, start: int
) -> RoutedExperts | None:
    """The rows that this turn adds, copied out of the response's buffer.

    The last token before the turn had no row yet: it was not forwarded then. Raises BadExperts
    when rows are missing, or when the turn does not fit the turns before it.
    """
    before = parent.experts if parent is not None else None
    if parent is not None and (before is None) != (experts is None):
        raise BadExperts(
            f"this turn came {'without' if experts is None else 'with'} routed experts, the turn "
            f"before {'with' if experts is None else 'without'}; request them on every turn or none"
        )
    if experts is None:
        return None
    if before is not None and (before.shape[1:], before.dtype) != (
        experts.shape[1:],
        experts.dtype,
    ):
        raise BadExperts(
            f"routed experts are {experts.dtype} of {experts.shape[1:]} per token, in the turn "
            f"before {before.dtype} of {before.shape[1:]}"
        )
    own = experts.from_row(max(start - 1, 0))
    return RoutedExperts(bytes(own.data), own.shape, own.dtype, own.start)


def _joined(parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
    rows = [part for part in parts if part is not None]
    if not rows:
        return None
    shape = (sum(part.rows for part in rows), *rows[0].shape[1:])
    return RoutedExperts(b"".join(part.data for part in rows), shape, rows[0].dtype)
