"""Adapters of a fleet: loaded, swapped and unloaded on all workers together, and proved."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lockstep.checkpoint.adapter import AdapterFiles
from lockstep.checkpoint.probe import Probe
from lockstep.checkpoint.validate import resolve
from lockstep.fleet.fan_out import Failures, quarantine_failed, run_phase
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.state import FleetState
from lockstep.fleet.update.judgement import (
    Witness,
    check_requirement,
    describe_other_weights,
    judge,
)
from lockstep.fleet.update.proof import (
    BUILTIN,
    CLOSE,
    Scores,
    collect_adapter_scores,
    collect_scores,
    differs,
    majority,
    reference_of,
)
from lockstep.fleet.update.transaction import is_lost
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import AdapterSpec, Reference
from lockstep.tokens.errors import (
    Conflict,
    Disproved,
    LockstepError,
    NotFound,
    Unavailable,
    UpdateFailed,
)
from lockstep.tokens.operation import Operation


class AdapterChanges:
    """Changes the adapters of all serving workers, and the desired state with them."""

    def __init__(self, state: FleetState) -> None:
        self._state = state

    async def load(self, name: str, path: str, version: str | None, operation: Operation) -> None:
        """Load an adapter on all serving workers, and prove it.

        Workers that fail, or whose scores differ from most, are quarantined. When no worker takes
        or proves the adapter, the adapter is wrong: all workers go back to the one they held under
        that name, and the error says why. Raises Conflict for the name of the model.
        """
        state = self._state
        directory = resolve(path, state.roots, "lora_path")
        base = await _base_names(state.pool, name)
        workers, before = state.serving(), state.desired.adapters.get(name)
        files, stored_probe = await asyncio.to_thread(_read_files, directory, state.roots)
        warning = await asyncio.to_thread(
            files.check_base, base, has_probe=stored_probe is not None
        )
        if warning is not None:
            operation.warnings.append(warning)
        probe = reference_of(stored_probe)
        base_scores = await self._base_scores(workers, probe, operation)
        labels: dict[Worker, str] = {}

        async def load(worker: Worker) -> None:
            labels[worker] = await worker.control.load_adapter(name, directory, version)

        loaded, failed = await run_phase(
            "load", workers, load, state.budget.stage, operation,
            straggler=state.budget.stage_straggler,
        )  # fmt: skip
        if not loaded:
            lost = {worker: error for worker, error in failed.items() if is_lost(error)}
            self._quarantine(lost, f"adapter {name!r} may or may not be loaded", operation)
            first = next(iter(failed.values()))
            raise type(first)(
                f"no worker loaded adapter {name!r}, and serving workers hold what they held: "
                f"{first.message}",
                param=first.param,
            )
        label = Counter(labels[worker] for worker in loaded).most_common(1)[0][0]
        sequences = probe.sequences if probe else BUILTIN
        scores, held, wrong = await collect_adapter_scores(
            "prove", loaded, sequences, name, directory, state.budget, operation
        )
        reference = probe or majority(scores, BUILTIN, CLOSE)
        proved: list[Worker] = []
        for worker, logprobs in scores.items():
            error: LockstepError | None = UpdateFailed("no majority of the workers agrees on it")
            if reference is not None:
                report = held[worker].read_back
                in_memory = held[worker].contents.in_memory
                witness = Witness(
                    # A read-back compares with the files. Other labels than those of Lockstep's own
                    # engine are the caller's, and say nothing of the contents.
                    contents="match" if report or (in_memory and label) else "unknown",
                    held=report,
                    in_memory=in_memory,
                    before=base_scores.get(worker),
                    earlier=worker.closeness,
                    dtype=held[worker].contents.dtype,
                    same=probe is None,
                )
                verdict = judge(logprobs, reference, witness)
                if probe is None and verdict.evidence.decided_by != "held":
                    verdict.evidence.decided_by = "majority"
                operation.workers[worker.id].evidence = verdict.evidence
                error = verdict.error or check_requirement(state.require_proof, witness)
            if labels[worker] != label:
                error = error or UpdateFailed(f"it read other contents: {labels[worker]!r}")
            if error is None:
                proved.append(worker)
                result = operation.workers[worker.id]
                result.status, result.phase, result.error = "ok", None, None
            else:
                wrong[worker] = error
        reason = f"adapter {name!r} could not be loaded"
        if not proved:
            self._quarantine(failed, reason, operation)
            await self._restore(loaded, name, before, operation)
            first = next(iter(wrong.values()))
            raise UpdateFailed(
                f"no worker proved adapter {name!r}, and all hold what they held: {first.message}"
            )
        self._quarantine(failed | wrong, reason, operation)
        spec = AdapterSpec(str(directory), label, version, reference)
        await self._decide({**state.desired.adapters, name: spec})
        operation.version = spec.label

    async def unload(self, name: str, operation: Operation) -> None:
        """Unload an adapter from all serving workers; quarantine those that still hold it. Raises
        NotFound when it is not loaded, and UpdateFailed when no worker could unload it."""
        state = self._state
        if name not in state.desired.adapters:
            state.serving()
            raise NotFound(f"adapter {name!r} is not loaded", param="lora_name")
        # Decided before it is unloaded: a worker that fails now is brought up without it.
        await self._decide({k: v for k, v in state.desired.adapters.items() if k != name})

        async def unload(worker: Worker) -> None:
            if name in (await worker.control.view()).adapters:
                await worker.control.unload_adapter(name)

        unloaded, failed = await run_phase(
            "unload", state.serving(), unload, state.budget.commit, operation
        )
        self._quarantine(failed, f"adapter {name!r} could not be unloaded", operation)
        if not unloaded:
            raise UpdateFailed(f"no worker could unload adapter {name!r}")

    async def prove_again(self, operation: Operation) -> None:
        """Take the scores of each adapter anew, now that the weights under it have changed.

        Workers that differ from the majority are quarantined. Without a majority the adapter has no
        reference. When no worker can score an adapter, the operation gets a warning.
        """
        for name, spec in self._state.desired.adapters.items():
            try:
                reference = await self._score_again(name, operation)
                renewed = msgspec.structs.replace(spec, reference=reference)
                await self._decide({**self._state.desired.adapters, name: renewed})
            except Unavailable as error:
                # The fleet has agreed on the new weights: an update that failed here would be
                # reported as failed although its version is served. Adapters without a reference
                # are measured when a worker is brought up.
                operation.warnings.append(
                    f"adapter {name!r} was not proved on the new weights: {error.message}"
                )

    async def _score_again(self, name: str, operation: Operation) -> Reference | None:
        directory = Path(self._state.desired.adapters[name].path)
        scores, held, wrong = await collect_adapter_scores(
            "adapters", self._state.serving(), BUILTIN, name, directory, self._state.budget,
            operation,
        )  # fmt: skip
        if wrong and not scores:
            first = next(iter(wrong.values()))
            operation.warnings.append(
                f"no worker could score adapter {name!r} on the new weights: {first.message}"
            )
            return None
        reference = majority(scores, BUILTIN, CLOSE)
        for worker, facts in held.items():
            if facts.read_back is not None and facts.read_back.different:
                wrong[worker] = Disproved(describe_other_weights(facts.read_back))
        if reference is not None:
            for worker, logprobs in scores.items():
                if (error := differs(logprobs, reference)) is not None:
                    wrong[worker] = error
        reason = f"adapter {name!r} was not proved on the new weights"
        self._quarantine(wrong, reason, operation)
        return reference

    async def _base_scores(
        self, workers: list[Worker], probe: Reference | None, operation: Operation
    ) -> dict[Worker, Scores]:
        """Return the scores without the adapter, to detect a worker that ignores the adapter.

        They are not needed where bits decide, or where the trainer sent the scores under the
        adapter before.
        """
        if probe is None or probe.tolerance == 0.0 or probe.previous is not None:
            return {}
        scores, _ = await collect_scores(
            "baseline", workers, probe.sequences, None, self._state.budget, operation
        )
        return scores

    async def _restore(
        self, workers: list[Worker], name: str, before: AdapterSpec | None, operation: Operation
    ) -> None:
        """Load the adapter that was served under that name before; quarantine on failure."""

        async def restore(worker: Worker) -> None:
            if before is None:
                await worker.control.unload_adapter(name)
                return
            label = await worker.control.load_adapter(name, Path(before.path), before.version)
            if label != before.label:
                raise UpdateFailed(f"it has become {label!r}, and {before.label!r} was served")

        restored, failed = await run_phase(
            "rollback", workers, restore, self._state.budget.stage, operation
        )
        for worker in restored:
            operation.workers[worker.id].status = "rolled_back"
        self._quarantine(failed, f"adapter {name!r} could not be undone", operation)

    async def _decide(self, adapters: dict[str, AdapterSpec]) -> None:
        await self._state.decide(msgspec.structs.replace(self._state.desired, adapters=adapters))

    def _quarantine(self, failed: Failures, reason: str, operation: Operation) -> None:
        quarantine_failed(failed, reason, operation, self._state.quarantine)


def _read_files(path: Path, roots: Sequence[Path]) -> tuple[AdapterFiles, Probe | None]:
    files = AdapterFiles.read(path, roots)
    files.check_modules()
    return files, Probe.beside(path)


async def _base_names(pool: Pool, name: str) -> list[str]:
    """Return the names and directories of the served model. Raises Conflict if `name` is one of
    its names: requests with it would be ambiguous."""
    reached = any(worker.serves and worker.opened for worker in pool.workers)
    cards = [card for card in await pool.models() if card.parent is None] if reached else []
    if any(card.id == name for card in cards):
        raise Conflict(
            f"lora_name is {name!r}, which is the name of the model: give the adapter another",
            param="lora_name",
        )
    return list(dict.fromkeys(text for card in cards for text in (card.id, card.root) if text))
