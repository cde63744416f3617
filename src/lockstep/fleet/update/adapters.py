"""Adapters on every worker: loaded, swapped and unloaded together, and proved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lockstep.checkpoint.probe import Probe
from lockstep.fleet.control.desired import AdapterSpec, Reference
from lockstep.fleet.member import Member, each
from lockstep.fleet.update.judgement import Witness, judge
from lockstep.fleet.update.proof import (
    BUILTIN,
    CLOSE,
    Scores,
    collect_scores,
    differs,
    majority,
    reference_of,
)
from lockstep.fleet.update.transaction import PhaseBudgets, is_lost
from lockstep.tokens.errors import LockstepError, UpdateFailed
from lockstep.tokens.operation import Operation

Quarantine = Callable[[Member, str], None]


async def load_everywhere(
    members: list[Member],
    name: str,
    path: Path,
    version: str | None,
    *,
    budget: PhaseBudgets,
    operation: Operation,
    quarantine: Quarantine,
) -> AdapterSpec:
    """Loads an adapter on all members; those that fail, or answer otherwise, are quarantined.

    Each worker checks the adapter before it swaps. When none takes it, every worker that serves
    holds what it held, and the error says why.
    """
    labels: dict[Member, str] = {}
    probe = reference_of(Probe.beside(path))
    base = await _base_answers(members, probe, budget, operation)

    async def load(member: Member) -> None:
        labels[member] = await member.admin.load_adapter(name, path, version)

    done, failed = await each("load", members, load, budget.stage, operation)
    if not done:
        lost = {member: error for member, error in failed.items() if is_lost(error)}
        drop(lost, f"adapter {name!r} may or may not be loaded", operation, quarantine)
        first = next(iter(failed.values()))
        raise type(first)(
            f"no worker took adapter {name!r}, and those that serve hold what they held: "
            f"{first.message}",
            param=first.param,
        )
    label = Counter(labels[member] for member in done).most_common(1)[0][0]
    scores, wrong = await collect_scores(
        "prove", done, probe.sequences if probe else BUILTIN, name, budget.prove, operation
    )
    reference = probe or majority(scores, BUILTIN, CLOSE)
    proved: list[Member] = []
    for member, said in scores.items():
        error: LockstepError | None = UpdateFailed("no majority of the workers agrees on it")
        if reference is not None:
            witness = Witness(
                contents="match" if label else "unknown",
                before=base.get(member),
                known=member.closeness,
                same=probe is None,
            )
            verdict = judge(said, reference, witness)
            if probe is None:
                verdict.evidence.decided_by = "majority"
            operation.workers[member.id].evidence = verdict.evidence
            error = verdict.error
        if labels[member] != label:
            error = error or UpdateFailed(f"it read other contents: {labels[member]!r}")
        if error is None:
            proved.append(member)
            result = operation.workers[member.id]
            result.status, result.phase, result.error = "ok", None, None
        else:
            wrong[member] = error
    drop(failed | wrong, f"adapter {name!r} could not be loaded", operation, quarantine)
    if not proved:
        raise UpdateFailed(f"no worker proved adapter {name!r}")
    return AdapterSpec(str(path), label, version, reference)


async def _base_answers(
    members: list[Member], probe: Reference | None, budget: PhaseBudgets, operation: Operation
) -> dict[Member, Scores]:
    """What the weights without the adapter say: a worker that serves those instead is told apart.

    Nobody is asked where bits decide, or where the trainer sent what the adapter before said.
    """
    if probe is None or probe.tolerance == 0.0 or probe.previous is not None:
        return {}
    scores, _ = await collect_scores("ask", members, probe.sequences, None, budget.prove, operation)
    return scores


async def prove_again(
    members: list[Member],
    name: str,
    *,
    budget: PhaseBudgets,
    operation: Operation,
    quarantine: Quarantine,
) -> Reference | None:
    """What the adapter answers now that the weights under it have changed.

    Members that the majority does not agree with are quarantined; without a majority nothing is
    known, and None is returned.
    """
    scores, wrong = await collect_scores(
        "adapters", members, BUILTIN, name, budget.prove, operation
    )
    reference = majority(scores, BUILTIN, CLOSE)
    if reference is not None:
        for member, said in scores.items():
            if (error := differs(said, reference)) is not None:
                wrong[member] = error
    drop(wrong, f"adapter {name!r} was not proved on the new weights", operation, quarantine)
    return reference


async def unload_everywhere(
    members: list[Member],
    name: str,
    *,
    budget: PhaseBudgets,
    operation: Operation,
    quarantine: Quarantine,
) -> None:
    """Unloads an adapter from all members; those that still hold it are quarantined."""

    async def unload(member: Member) -> None:
        if name in (await member.admin.view()).adapters:
            await member.admin.unload_adapter(name)

    done, failed = await each("unload", members, unload, budget.commit, operation)
    drop(failed, f"adapter {name!r} could not be unloaded", operation, quarantine)
    if not done:
        raise UpdateFailed(f"no worker could unload adapter {name!r}")


def drop(
    failed: dict[Member, LockstepError], what: str, operation: Operation, quarantine: Quarantine
) -> None:
    for member, error in failed.items():
        result = operation.workers[member.id]
        result.status, result.error = "quarantined", f"{what}: {error.message}"
        quarantine(member, f"{what}: {error.message}")
