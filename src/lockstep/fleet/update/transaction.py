"""The weight transaction: stage, prove, quiesce, commit, resume; or everybody back.

Workers that can prove what is staged do so before the pause, while they go on serving: in it they
only swap, and only for the very weights they proved. The others prove them after the commit.

Rules. A worker that cannot be reached, or takes too long (also: much longer than most), is
quarantined and the others go on, unless fewer than half would be left. A worker that refuses the
checkpoint stops the whole update: the others would have to be wrong to take it. After the commit,
workers that do not prove the new weights are quarantined; when none does, the weights (or the
probe) are wrong and all are rolled back. Whatever happens, no worker that gets traffic holds
anything but the accepted version.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import perf_counter

from lockstep.backends.admin import PauseMode, Source
from lockstep.fleet.fan_out import (
    Failures,
    PhaseBudgets,
    Quarantine,
    each,
    quarantine_failed,
)
from lockstep.fleet.update.proof import Proof
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Reference
from lockstep.tokens.errors import (
    CheckpointError,
    ContractError,
    DeadlineExceeded,
    LockstepError,
    Superseded,
    Unavailable,
    UpdateFailed,
)
from lockstep.tokens.operation import Operation


class Transaction:
    """One update of the weights of `workers`, which all serve `before` now.

    `quarantine` is called for each worker that must not get traffic any more, `hold` for one that
    must not get any for a while. `paused` says how the fleet is paused, which it then stays.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        source: Source,
        version: str,
        proof: Proof,
        *,
        operation: Operation,
        quarantine: Quarantine,
        hold: Callable[[Worker, bool], None],
        mode: PauseMode = "keep",
        paused: PauseMode | None = None,
        budget: PhaseBudgets | None = None,
    ) -> None:
        self._workers = list(workers)
        self._source = source
        self._version = version
        self._proof = proof
        self._operation = operation
        self._quarantine = quarantine
        self._hold = hold
        self._mode: PauseMode = mode
        self._paused_before = paused
        self._budget = budget or PhaseBudgets()
        self._paused_at: float | None = None
        self._swapped: set[Worker] = set()
        self._dropped: set[Worker] = set()

    async def run(self, agree: Callable[[Reference, Sequence[Worker]], Awaitable[None]]) -> None:
        """Brings every worker to the new version, proved. `agree` is called once it is, with the
        workers that are.

        Raises UpdateFailed when it did not happen; the operation says who and why.
        """
        if not self._workers:
            raise Unavailable("no worker serves: there is nobody to update")
        staged = await self._prove_staged(await self._stage())
        try:
            committed = await self._switch(staged)
            await self._let_probe(committed)
            reference, proved, wrong = await self._proof.prove_committed(
                committed, self._budget, self._operation
            )
            self._mark_wrong(wrong)
            if reference is None or not self._enough(proved):
                raise _first(wrong, "no worker proved the new weights")
            await agree(reference, proved)
        except LockstepError as error:
            await self._undo(staged, error)
            raise self._failed(error) from error
        except Exception as error:
            cause = UpdateFailed(f"it could not be recorded: {error!r}")
            await self._undo(staged, cause)
            raise self._failed(cause) from error
        self._drop(wrong, f"it did not prove version {self._version!r}")
        for worker in proved:
            worker.version = self._version
            result = self._operation.workers[worker.id]
            result.status, result.phase, result.error = "ok", None, None
        await self._resume(proved, self._proof.resume)

    async def _stage(self) -> list[Worker]:
        """Loads beside the live weights, which go on serving; and takes the scores of those."""
        # At once: a worker reads the new weights while it computes with those it has.
        _, (staged, failed) = await asyncio.gather(
            self._proof.before(self._workers, self._budget, self._operation),
            each(
                "stage", self._workers,
                lambda worker: worker.control.stage(self._source, self._version),
                self._budget.stage, self._operation, straggler=self._budget.stage_straggler,
            ),
        )  # fmt: skip
        lost = {w: e for w, e in failed.items() if is_lost(e)}
        refused = {w: e for w, e in failed.items() if w not in lost}
        if refused or not self._enough(staged):
            error = _first(refused or failed, "staging failed")
            if len(lost) == len(self._workers):
                # Most likely it is the source that never came: who still responds is as it was.
                await self._unstage(self._workers)
            else:
                await self._unstage(staged)
                self._drop(lost, "it was lost while staging")
            raise self._failed(error)
        self._drop(lost, "it was lost while staging")
        return staged

    async def _prove_staged(self, staged: list[Worker]) -> list[Worker]:
        """Has those prove it that can while it is staged; none was paused yet, none swapped."""
        ready, wrong = await self._proof.prove_staged(staged, self._budget, self._operation)
        self._mark_wrong(wrong)
        if not self._enough(ready):
            error = _first(wrong, "no worker proved the new weights")
            await self._unstage(staged)
            self._rolled_back(staged, error)
            raise self._failed(error)
        self._drop(wrong, f"it did not prove version {self._version!r}")
        return ready

    async def _switch(self, staged: list[Worker]) -> list[Worker]:
        """Pauses and commits; workers that fail in it are quarantined."""
        self._paused_at = perf_counter()
        if self._paused_before is None:
            modes = {worker: self._mode_for(worker) for worker in staged}
            # Requests that are waited for are long on one worker and short on another.
            waits = "wait" in modes.values()
            quiet, failed = await each(
                "quiesce", staged, lambda worker: worker.control.pause(modes[worker]),
                self._budget.pause, self._operation,
                straggler=math.inf if waits else self._budget.straggler,
            )  # fmt: skip
        else:
            quiet, failed = list(staged), {}
        self._require(quiet, failed)
        self._drop(failed, "it did not pause")

        async def commit(worker: Worker) -> None:
            self._swapped.add(worker)
            await self._proof.commit(worker, self._version)

        seconds = self._budget.commit
        if self._proof.only_swaps(quiet):
            seconds = min(seconds, self._budget.swap)
        committed, failed = await each(
            "commit", quiet, commit, seconds, self._operation, straggler=self._budget.straggler
        )
        self._require(committed, failed)
        self._drop(failed, "it did not commit")
        return committed

    def _mode_for(self, worker: Worker) -> PauseMode:
        """How to pause this worker. One that must run for its probe would go on with the requests
        that `keep` froze, on weights that are not proved: it ends them first."""
        if self._mode == "keep" and not worker.control.probes_while_paused:
            return "wait"
        return self._mode

    async def _let_probe(self, workers: list[Worker]) -> None:
        """Resumes, without traffic, those that take no probe while they are paused."""
        unprobed = [worker for worker in workers if not worker.control.probes_while_paused]
        for worker in unprobed:
            self._hold(worker, True)
        await each(
            "resume", unprobed, lambda worker: worker.control.resume(),
            self._budget.resume, self._operation,
        )  # fmt: skip

    async def _resume(
        self, workers: list[Worker], go_on: Callable[[Worker], Awaitable[None]]
    ) -> None:
        """Resumes all; or, in a fleet that is paused, pauses those again that took a probe."""

        async def resume(worker: Worker) -> None:
            if self._paused_before is None:
                await go_on(worker)
            elif not worker.control.probes_while_paused:
                await worker.control.pause(self._paused_before)

        _, failed = await each("resume", workers, resume, self._budget.resume, self._operation)
        self._drop(failed, "it did not resume")
        for worker in workers:
            self._hold(worker, False)
        if self._paused_at is not None:
            self._operation.pause_seconds = round(perf_counter() - self._paused_at, 6)

    async def _undo(self, workers: list[Worker], why: LockstepError) -> None:
        """Everybody back to the version before, proved, and resumed; who cannot is quarantined."""
        left = [worker for worker in workers if self._is_left(worker)]

        async def back(worker: Worker) -> None:
            view = await worker.control.view()
            if view.staged is not None:
                await worker.control.rollback()
                view = await worker.control.view()
            unknown = view.version is None and worker in self._swapped
            if unknown or view.version == self._version != worker.version:
                await worker.control.rollback()

        restored, failed = await each("rollback", left, back, self._budget.commit, self._operation)
        same, wrong = await self._proof.unchanged(restored, self._budget, self._operation)
        self._drop(failed | wrong, "it could not be rolled back")
        await self._resume(same, lambda worker: worker.control.resume())
        self._rolled_back(same, why)

    async def _unstage(self, workers: list[Worker]) -> None:
        async def drop(worker: Worker) -> None:
            # With nothing staged, a rollback would undo the commit before.
            if (await worker.control.view()).staged is not None:
                await worker.control.rollback()

        _, failed = await each("rollback", workers, drop, self._budget.commit, self._operation)
        self._drop(failed, "what was staged could not be dropped")

    def _require(self, succeeded: list[Worker], failed: Failures) -> None:
        if not self._enough(succeeded):
            raise _first(failed, "too few workers are left")

    def _enough(self, workers: list[Worker]) -> bool:
        """At least half of those that began: a fleet does not shrink to its broken part."""
        return len(workers) * 2 >= len(self._workers) and bool(workers)

    def _mark_wrong(self, wrong: Failures) -> None:
        for worker, error in wrong.items():
            result = self._operation.workers[worker.id]
            result.status, result.phase, result.error = "failed", "prove", error.message

    def _rolled_back(self, workers: list[Worker], why: LockstepError) -> None:
        for worker in workers:
            if self._is_left(worker):
                result = self._operation.workers[worker.id]
                result.status, result.error = "rolled_back", result.error or why.message

    def _drop(self, failed: Failures, why: str) -> None:
        """Quarantines workers, which need not be held back any more then."""
        quarantine_failed(failed, why, self._operation, self._quarantine)
        for worker in failed:
            self._dropped.add(worker)
            self._hold(worker, False)

    def _is_left(self, worker: Worker) -> bool:
        """Whether it is still part of the update: neither quarantined by it nor being removed.

        One that a failed request brought down meanwhile is: it has swapped its weights as the
        others have, and cannot be brought up again before the operation ends.
        """
        return worker not in self._dropped and not worker.leaving

    def _failed(self, error: LockstepError) -> UpdateFailed | LockstepError:
        if isinstance(error, CheckpointError | Superseded):
            return error
        return UpdateFailed(
            f"the update to {self._version!r} was undone on all workers: {error.message}"
        )


def is_lost(error: LockstepError) -> bool:
    """Whether the worker, and not the weights, is to blame."""
    return isinstance(error, Unavailable | DeadlineExceeded | ContractError)


def _first(failed: Failures, otherwise: str) -> LockstepError:
    for worker, error in failed.items():
        return error.with_message(f"worker {worker.id}: {error.message}")
    return Unavailable(otherwise)
