"""The weight transaction: stage, prove, quiesce, commit, resume; or roll all workers back.

Workers that can prove staged weights do so before the pause, while they keep serving. During the
pause they only swap, and only to the very weights that they proved. The others prove the weights
after the commit.

Rules. A worker that cannot be reached or takes too long (also: much longer than most) is
quarantined and the others continue, unless fewer than half would remain. A worker that rejects the
checkpoint stops the whole update: a checkpoint that is wrong for one worker is wrong for all. After
the commit, workers that do not prove the new weights are quarantined; when none does, the weights
(or the probe) are wrong and all workers are rolled back. In every case, a worker that gets traffic
holds the accepted version.
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
    quarantine_failed,
    run_phase,
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
from lockstep.tokens.operation import Operation, WorkerResult


class Transaction:
    """One update of the weights of `workers`.

    `quarantine` is called for each worker that must not get traffic any more, `hold` for one that
    must not get any for a while. `paused` is the pause mode of a fleet that is paused; it stays
    paused.
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
        """Bring every worker to the new version, proved.

        Once that is done, `agree` is called with the workers that proved it. It records the new
        version. Raises UpdateFailed when the update did not happen; the operation has the result of
        each worker.
        """
        if not self._workers:
            raise Unavailable("no worker serves: there is nothing to update")
        staged = await self._prove_staged(await self._stage())
        try:
            committed = await self._switch(staged)
            await self._let_probe(committed)
            reference, proved, wrong = await self._proof.prove_committed(
                committed, self._budget, self._operation
            )
            self._mark_wrong(wrong)
            if reference is None or not self._enough(proved):
                raise _first_error(wrong, "no worker proved the new weights")
            # The commit point of the whole update. Up to here every worker is still paused or held,
            # so undoing it is invisible to requests.
            await agree(reference, proved)
        except LockstepError as error:
            await self._undo(staged, error)
            raise self._as_failure(error) from error
        except Exception as error:
            cause = UpdateFailed(f"the new version could not be recorded: {error!r}")
            await self._undo(staged, cause)
            raise self._as_failure(cause) from error
        self._drop(wrong, f"it did not prove version {self._version!r}")
        for worker in proved:
            worker.version = self._version
            result = self._operation.workers[worker.id]
            result.status, result.phase, result.error = "ok", None, None
        await self._resume(proved, self._proof.resume)

    async def _stage(self) -> list[Worker]:
        """Load the new weights beside the live ones, which keep serving; take the live scores."""
        # Concurrently: a worker reads the new weights while it scores with the live ones.
        _, (staged, failed) = await asyncio.gather(
            self._proof.before(self._workers, self._budget, self._operation),
            run_phase(
                "stage", self._workers,
                self._stage_one,
                self._budget.stage, self._operation, straggler=self._budget.stage_straggler,
            ),
        )  # fmt: skip
        lost = {w: e for w, e in failed.items() if is_lost(e)}
        refused = {w: e for w, e in failed.items() if w not in lost}
        if refused or not self._enough(staged):
            error = _first_error(refused or failed, "staging failed")
            if len(lost) == len(self._workers):
                # Most likely the source never sent anything. Quarantining all workers would take
                # the fleet down for it; workers that still respond are unchanged.
                await self._unstage(self._workers)
            else:
                await self._unstage(staged)
                self._drop(lost, "it was lost while staging")
            raise self._as_failure(error)
        self._drop(lost, "it was lost while staging")
        return staged

    async def _stage_one(self, worker: Worker) -> None:
        fetched = await worker.control.stage(self._source, self._version)
        if fetched is not None:
            self._operation.workers.setdefault(worker.id, WorkerResult()).fetched = fetched

    async def _prove_staged(self, staged: list[Worker]) -> list[Worker]:
        """Prove the weights on workers that can while staged. No worker has paused or swapped
        yet."""
        ready, wrong = await self._proof.prove_staged(staged, self._budget, self._operation)
        self._mark_wrong(wrong)
        if not self._enough(ready):
            error = _first_error(wrong, "no worker proved the new weights")
            await self._unstage(staged)
            self._rolled_back(staged, error)
            raise self._as_failure(error)
        self._drop(wrong, f"it did not prove version {self._version!r}")
        return ready

    async def _switch(self, staged: list[Worker]) -> list[Worker]:
        """Pause and commit. Workers that fail are quarantined."""
        self._paused_at = perf_counter()
        # Requests that these get while paused would run on unproved weights during their probe.
        self._hold_unprobed(staged)
        if self._paused_before is None:
            modes = {worker: self._mode_for(worker) for worker in staged}
            # With `wait`, running requests finish first. They are long on one worker and short on
            # another, so a slow worker is no straggler.
            waits = "wait" in modes.values()
            quiet, failed = await run_phase(
                "quiesce", staged, lambda worker: worker.control.pause(modes[worker]),
                self._budget.pause, self._operation,
                straggler=math.inf if waits else self._budget.straggler,
            )  # fmt: skip
        else:
            quiet, failed = list(staged), {}
        self._require(quiet, failed)
        self._drop(failed, "it did not pause")

        async def commit(worker: Worker) -> None:
            # Before the call: if its response is lost, the worker may or may not have swapped.
            self._swapped.add(worker)
            await self._proof.commit(worker, self._version)

        seconds = self._budget.commit
        if self._proof.only_swaps(quiet):
            seconds = min(seconds, self._budget.swap)
        committed, failed = await run_phase(
            "commit", quiet, commit, seconds, self._operation, straggler=self._budget.straggler
        )
        self._require(committed, failed)
        self._drop(failed, "it did not commit")
        return committed

    def _mode_for(self, worker: Worker) -> PauseMode:
        """Return how to pause a worker. A worker that must run for its probe would continue the
        requests that `keep` froze, on weights that are not proved. It finishes them first."""
        if self._mode == "keep" and not worker.control.probes_while_paused:
            return "wait"
        return self._mode

    async def _let_probe(self, workers: list[Worker]) -> None:
        """Resume, without traffic, the workers that cannot score a probe while paused."""
        await run_phase(
            "resume", self._hold_unprobed(workers), lambda worker: worker.control.resume(),
            self._budget.resume, self._operation,
        )  # fmt: skip

    def _hold_unprobed(self, workers: list[Worker]) -> list[Worker]:
        """Withhold requests from the workers that cannot score a probe while paused; return
        them."""
        unprobed = [worker for worker in workers if not worker.control.probes_while_paused]
        for worker in unprobed:
            self._hold(worker, True)
        return unprobed

    async def _resume(
        self, workers: list[Worker], resume_worker: Callable[[Worker], Awaitable[None]]
    ) -> None:
        """Resume all workers. In a paused fleet, pause those again that ran for their probe."""

        async def resume(worker: Worker) -> None:
            if self._paused_before is None:
                await resume_worker(worker)
            elif not worker.control.probes_while_paused:
                await worker.control.pause(self._paused_before)

        _, failed = await run_phase("resume", workers, resume, self._budget.resume, self._operation)
        self._drop(failed, "it did not resume")
        for worker in workers:
            self._hold(worker, False)
        if self._paused_at is not None:
            self._operation.pause_seconds = round(perf_counter() - self._paused_at, 6)

    async def _undo(self, workers: list[Worker], why: LockstepError) -> None:
        """Roll all workers back to the version before, prove it, and resume; quarantine on
        failure."""
        remaining = [worker for worker in workers if self._remains(worker)]

        async def roll_back(worker: Worker) -> None:
            view = await worker.control.view()
            if view.staged is not None:
                await worker.control.rollback()
                view = await worker.control.view()
            # A worker that reports no version is rolled back if a commit was sent to it. One that
            # reports the new version is, unless it served that label before the update.
            unknown = view.version is None and worker in self._swapped
            if unknown or view.version == self._version != worker.version:
                if not worker.control.stages:
                    # It loads the weights before, which needs a pause, and ran for its probe.
                    await worker.control.pause("abort")
                await worker.control.rollback()

        restored, failed = await run_phase(
            "rollback", remaining, roll_back, self._budget.commit, self._operation
        )
        await self._let_probe(restored)
        same, wrong = await self._proof.prove_unchanged(restored, self._budget, self._operation)
        self._drop(failed | wrong, "it could not be rolled back")
        await self._resume(same, lambda worker: worker.control.resume())
        self._rolled_back(same, why)

    async def _unstage(self, workers: list[Worker]) -> None:
        async def drop(worker: Worker) -> None:
            # Without anything staged, a rollback would undo the last commit instead.
            if (await worker.control.view()).staged is not None:
                await worker.control.rollback()

        _, failed = await run_phase("rollback", workers, drop, self._budget.commit, self._operation)
        self._drop(failed, "its staged weights could not be dropped")

    def _require(self, succeeded: list[Worker], failed: Failures) -> None:
        if not self._enough(succeeded):
            raise _first_error(failed, "too few workers are left")

    def _enough(self, workers: list[Worker]) -> bool:
        """Return whether at least half of the workers remain: a fleet must not shrink to a broken
        part."""
        return len(workers) * 2 >= len(self._workers) and bool(workers)

    def _mark_wrong(self, wrong: Failures) -> None:
        for worker, error in wrong.items():
            result = self._operation.workers[worker.id]
            result.status, result.phase, result.error = "failed", "prove", error.message

    def _rolled_back(self, workers: list[Worker], why: LockstepError) -> None:
        for worker in workers:
            if self._remains(worker):
                result = self._operation.workers[worker.id]
                result.status, result.error = "rolled_back", result.error or why.message

    def _drop(self, failed: Failures, why: str) -> None:
        """Quarantine workers. A quarantined worker need not be held back any more."""
        quarantine_failed(failed, why, self._operation, self._quarantine)
        for worker in failed:
            self._dropped.add(worker)
            self._hold(worker, False)

    def _remains(self, worker: Worker) -> bool:
        """Return whether a worker is still part of the update: not quarantined by it, and not
        leaving.

        A worker that went down because a request failed on it is still part of it: it has swapped
        its weights like the others, and cannot be brought up before the operation ends.
        """
        return worker not in self._dropped and not worker.leaving

    def _as_failure(self, error: LockstepError) -> UpdateFailed | LockstepError:
        if isinstance(error, CheckpointError | Superseded):
            return error
        return UpdateFailed(
            f"the update to {self._version!r} was undone on all workers: {error.message}"
        )


def is_lost(error: LockstepError) -> bool:
    """Return whether the worker is to blame for an error, and not the weights."""
    return isinstance(error, Unavailable | DeadlineExceeded | ContractError)


def _first_error(failed: Failures, otherwise: str) -> LockstepError:
    for worker, error in failed.items():
        return error.with_message(f"worker {worker.id}: {error.message}")
    return Unavailable(otherwise)
