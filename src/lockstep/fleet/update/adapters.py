"""Adapters on every worker: loaded, swapped and unloaded together, and proved."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from lockstep.checkpoint.probe import Probe
from lockstep.fleet.fan_out import PhaseBudgets, Quarantine, each, quarantine_failed
from lockstep.fleet.routing.pool import Pool
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
from lockstep.fleet.update.transaction import is_lost
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import AdapterSpec, Reference
from lockstep.tokens.errors import Conflict, LockstepError, UpdateFailed
from lockstep.tokens.operation import Operation


async def check_not_base(pool: Pool, name: str) -> None:
    """Raises Conflict for the name of the model: requests with it would no longer tell which of
    both they mean."""
    reached = any(worker.serves and worker.opened for worker in pool.workers)
    cards = await pool.models() if reached else []
    if any(card.id == name and card.parent is None for card in cards):
        raise Conflict(
            f"lora_name is {name!r}, which is the name of the model: give the adapter another",
            param="lora_name",
        )


async def load_everywhere(
    workers: list[Worker],
    name: str,
    path: Path,
    version: str | None,
    *,
    before: AdapterSpec | None,
    budget: PhaseBudgets,
    operation: Operation,
    quarantine: Quarantine,
) -> AdapterSpec:
    """Loads an adapter on all workers; those that fail, or score otherwise than
    most, are quarantined.

    Each worker checks the adapter before it swaps. When none takes it, or none proves it, it is the
    adapter: all go back to `before`, what they held under that name, and the error says why.
    """
    labels: dict[Worker, str] = {}
    probe = reference_of(Probe.beside(path))
    base = await _base_scores(workers, probe, budget, operation)

    async def load(worker: Worker) -> None:
        labels[worker] = await worker.control.load_adapter(name, path, version)

    loaded, failed = await each(
        "load", workers, load, budget.stage, operation, straggler=budget.stage_straggler
    )
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
        "prove", loaded, probe.sequences if probe else BUILTIN, name, budget, operation
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
    if not proved:
        quarantine_failed(failed, f"adapter {name!r} could not be loaded", operation, quarantine)
        await _go_back(loaded, name, before, budget, operation, quarantine)
        first = next(iter(wrong.values()))
        raise UpdateFailed(
            f"no worker proved adapter {name!r}, and all hold what they held: {first.message}"
        )
    quarantine_failed(
        failed | wrong, f"adapter {name!r} could not be loaded", operation, quarantine
    )
    return AdapterSpec(str(path), label, version, reference)


async def _go_back(
    workers: list[Worker],
    name: str,
    before: AdapterSpec | None,
    budget: PhaseBudgets,
    operation: Operation,
    quarantine: Quarantine,
) -> None:
    """Puts back what was served under that name; who cannot is quarantined."""

    async def back(worker: Worker) -> None:
        if before is None:
            await worker.control.unload_adapter(name)
            return
        label = await worker.control.load_adapter(name, Path(before.path), before.version)
        if label != before.label:
            raise UpdateFailed(f"it has become {label!r}, and {before.label!r} was served")

    same, failed = await each("rollback", workers, back, budget.stage, operation)
    for worker in same:
        operation.workers[worker.id].status = "rolled_back"
    quarantine_failed(failed, f"adapter {name!r} could not be undone", operation, quarantine)


async def _base_scores(
    workers: list[Worker], probe: Reference | None, budget: PhaseBudgets, operation: Operation
) -> dict[Worker, Scores]:
    """The scores of the weights without the adapter: a worker that serves those instead is found.

    None are needed where bits decide, or where the trainer sent the scores of the adapter before.
    """
    if probe is None or probe.tolerance == 0.0 or probe.previous is not None:
        return {}
    scores, _ = await collect_scores("baseline", workers, probe.sequences, None, budget, operation)
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
    known, and None is returned. When none can score it, that is a warning of the operation.
    """
    scores, wrong = await collect_scores("adapters", workers, BUILTIN, name, budget, operation)
    if wrong and not scores:
        first = next(iter(wrong.values()))
        operation.warnings.append(
            f"no worker could score adapter {name!r} on the new weights: {first.message}"
        )
        return None
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
