"""Adapters on every worker: loaded, swapped and unloaded together, and proved."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from lockstep.checkpoint.probe import Probe
from lockstep.fleet.control.desired import AdapterSpec, Reference
from lockstep.fleet.fan_out import Quarantine, each, quarantine_failed
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
from lockstep.fleet.worker import Worker
from lockstep.tokens.errors import LockstepError, UpdateFailed
from lockstep.tokens.operation import Operation


async def load_everywhere(
    workers: list[Worker],
    name: str,
    path: Path,
    version: str | None,
    *,
    budget: PhaseBudgets,
    operation: Operation,
    quarantine: Quarantine,
) -> AdapterSpec:
    """Loads an adapter on all workers; those that fail, or score otherwise than
    most, are quarantined.

    Each worker checks the adapter before it swaps. When none takes it, every worker that serves
    holds what it held, and the error says why.
    """
    labels: dict[Worker, str] = {}
    probe = reference_of(Probe.beside(path))
    base = await _base_scores(workers, probe, budget, operation)

    async def load(worker: Worker) -> None:
        labels[worker] = await worker.control.load_adapter(name, path, version)

    loaded, failed = await each("load", workers, load, budget.stage, operation)
    if not loaded:
        lost = {worker: error for worker, error in failed.items() if is_lost(error)}
        quarantine_failed(lost, f"adapter {name!r} may or may not be loaded", operation, quarantine)
        first = next(iter(failed.values()))
        raise type(first)(
            f"no worker took adapter {name!r}, and those that serve hold what they held: "
            f"{first.message}",
            param=first.param,
        )
    label = Counter(labels[worker] for worker in loaded).most_common(1)[0][0]
    scores, wrong = await collect_scores(
        "prove", loaded, probe.sequences if probe else BUILTIN, name, budget.prove, operation
    )
    reference = probe or majority(scores, BUILTIN, CLOSE)
    proved: list[Worker] = []
    for worker, logprobs in scores.items():
        error: LockstepError | None = UpdateFailed("no majority of the workers agrees on it")
        if reference is not None:
            witness = Witness(
                contents="match" if label else "unknown",
                before=base.get(worker),
                known=worker.closeness,
                same=probe is None,
            )
            verdict = judge(logprobs, reference, witness)
            if probe is None:
                verdict.evidence.decided_by = "majority"
            operation.workers[worker.id].evidence = verdict.evidence
            error = verdict.error
        if labels[worker] != label:
            error = error or UpdateFailed(f"it read other contents: {labels[worker]!r}")
        if error is None:
            proved.append(worker)
            result = operation.workers[worker.id]
            result.status, result.phase, result.error = "ok", None, None
        else:
            wrong[worker] = error
    quarantine_failed(
        failed | wrong, f"adapter {name!r} could not be loaded", operation, quarantine
    )
    if not proved:
        raise UpdateFailed(f"no worker proved adapter {name!r}")
    return AdapterSpec(str(path), label, version, reference)


async def _base_scores(
    workers: list[Worker], probe: Reference | None, budget: PhaseBudgets, operation: Operation
) -> dict[Worker, Scores]:
    """The scores of the weights without the adapter: a worker that serves those instead is found.

    None are needed where bits decide, or where the trainer sent the scores of the adapter before.
    """
    if probe is None or probe.tolerance == 0.0 or probe.previous is not None:
        return {}
    scores, _ = await collect_scores("ask", workers, probe.sequences, None, budget.prove, operation)
    return scores


async def prove_again(
    workers: list[Worker],
    name: str,
    *,
    budget: PhaseBudgets,
    operation: Operation,
    quarantine: Quarantine,
) -> Reference | None:
    """The scores of an adapter now that the weights under it have changed.

    Workers that the majority does not agree with are quarantined; without a majority nothing is
    known, and None is returned.
    """
    scores, wrong = await collect_scores(
        "adapters", workers, BUILTIN, name, budget.prove, operation
    )
    reference = majority(scores, BUILTIN, CLOSE)
    if reference is not None:
        for worker, logprobs in scores.items():
            if (error := differs(logprobs, reference)) is not None:
                wrong[worker] = error
    quarantine_failed(
        wrong, f"adapter {name!r} was not proved on the new weights", operation, quarantine
    )
    return reference


async def unload_everywhere(
    workers: list[Worker],
    name: str,
    *,
    budget: PhaseBudgets,
    operation: Operation,
    quarantine: Quarantine,
) -> None:
    """Unloads an adapter from all workers; those that still hold it are quarantined."""

    async def unload(worker: Worker) -> None:
        if name in (await worker.control.view()).adapters:
            await worker.control.unload_adapter(name)

    unloaded, failed = await each("unload", workers, unload, budget.commit, operation)
    quarantine_failed(failed, f"adapter {name!r} could not be unloaded", operation, quarantine)
    if not unloaded:
        raise UpdateFailed(f"no worker could unload adapter {name!r}")
