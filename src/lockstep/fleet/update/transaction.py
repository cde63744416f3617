"""The weight transaction: stage, prove, quiesce, commit, resume; or everybody back.

Workers that can prove what is staged do so before the pause, while they go on serving: in it they
only swap, and only for the very weights they proved. The others prove them after the commit.

Rules. A worker that cannot be reached, or takes too long, is quarantined and the others go on,
unless fewer than half would be left. A worker that refuses the checkpoint stops the whole update:
the others would have to be wrong to take it. After the commit, workers that do not prove the new
weights are quarantined; when none does, the weights (or the probe) are wrong and all are rolled
back. Whatever happens, no worker that is given traffic holds anything but the agreed version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

from lockstep.backends.admin import PauseMode, Source
from lockstep.fleet.control.desired import Reference
from lockstep.fleet.member import Failures, Member, each
from lockstep.fleet.update.proof import Proof
from lockstep.tokens.errors import (
    CheckpointError,
    ContractError,
    DeadlineExceeded,
    LockstepError,
    Unavailable,
    UpdateFailed,
)
from lockstep.tokens.operation import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBudgets:
    """Seconds that one worker may take for each phase."""

    stage: float = 600.0
    pause: float = 60.0
    commit: float = 120.0
    prove: float = 60.0
    resume: float = 30.0


class Transaction:
    """One update of the weights of `members`, which all serve `before` now.

    `quarantine` is called for each member that must not get traffic any more, `hold` for one that
    must not get any for a while. `paused` says how the fleet is paused, which it then stays.
    """

    def __init__(
        self,
        members: Iterable[Member],
        source: Source,
        version: str,
        proof: Proof,
        *,
        operation: Operation,
        quarantine: Callable[[Member, str], None],
        hold: Callable[[Member, bool], None],
        mode: PauseMode = "keep",
        paused: PauseMode | None = None,
        budget: PhaseBudgets | None = None,
    ) -> None:
        self._members = list(members)
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
        self._swapped: set[Member] = set()

    async def run(self, agree: Callable[[Reference], None]) -> None:
        """Brings every member to the new version, proved. `agree` is called once it is.

        Raises UpdateFailed when it did not happen; the operation says who and why.
        """
        if not self._members:
            raise Unavailable("no worker serves: there is nobody to update")
        staged = await self._prove_ahead(await self._stage())
        try:
            committed = await self._switch(staged)
            await self._let_answer(committed)
            reference, proved, wrong = await self._proof.after(
                committed, self._budget.prove, self._operation
            )
            self._mark_wrong(wrong)
            if reference is None or not self._enough(proved):
                raise _first(wrong, "no worker proved the new weights")
            agree(reference)
        except LockstepError as error:
            await self._undo(staged, error)
            raise self._failed(error) from error
        except Exception as error:
            cause = UpdateFailed(f"it could not be recorded: {error!r}")
            await self._undo(staged, cause)
            raise self._failed(cause) from error
        self._drop_wrong(wrong)
        for member in proved:
            member.version = self._version
            result = self._operation.workers[member.id]
            result.status, result.phase, result.error = "ok", None, None
        await self._resume(proved, self._proof.resume)

    async def _stage(self) -> list[Member]:
        """Loads beside the live weights, which go on serving; and asks what those answer."""
        await self._proof.before(self._members, self._budget.prove, self._operation)

        async def stage(member: Member) -> None:
            await member.admin.stage(self._source, self._version)

        done, failed = await each(
            "stage", self._members, stage, self._budget.stage, self._operation
        )
        refused = {m: e for m, e in failed.items() if not is_lost(e)}
        if refused or not self._enough(done):
            error = _first(refused or failed, "staging failed")
            await self._unstage(done)
            self._drop_lost(failed)
            raise self._failed(error)
        self._drop_lost(failed)
        return done

    async def _prove_ahead(self, staged: list[Member]) -> list[Member]:
        """Has those prove it that can while it is staged; nobody was paused yet, nobody swapped."""
        ready, wrong = await self._proof.ahead(staged, self._budget.prove, self._operation)
        self._mark_wrong(wrong)
        if not self._enough(ready):
            error = _first(wrong, "no worker proved the new weights")
            await self._unstage(staged)
            self._rolled_back(staged, error)
            raise self._failed(error)
        self._drop_wrong(wrong)
        return ready

    async def _switch(self, staged: list[Member]) -> list[Member]:
        """Pauses and commits; members that fail in it are quarantined."""
        self._paused_at = perf_counter()
        if self._paused_before is None:

            async def pause(member: Member) -> None:
                await member.admin.pause(self._mode_for(member))

            quiet, failed = await each(
                "quiesce", staged, pause, self._budget.pause, self._operation
            )
        else:
            quiet, failed = list(staged), {}
        self._require(quiet, failed)
        for member, error in failed.items():
            self._drop(member, f"it did not pause: {error.message}")

        async def commit(member: Member) -> None:
            self._swapped.add(member)
            await self._proof.commit(member, self._version)

        committed, failed = await each(
            "commit", quiet, commit, self._budget.commit, self._operation
        )
        self._require(committed, failed)
        for member, error in failed.items():
            self._drop(member, f"it did not commit: {error.message}")
        return committed

    def _mode_for(self, member: Member) -> PauseMode:
        """Frozen requests would go on unproved on a worker that must run to answer a probe."""
        if self._mode == "keep" and not member.admin.probes_while_paused:
            return "wait"
        return self._mode

    async def _let_answer(self, members: list[Member]) -> None:
        """Resumes, without traffic, those that answer no probe while they are paused."""
        mute = [member for member in members if not member.admin.probes_while_paused]
        for member in mute:
            self._hold(member, True)

        async def resume(member: Member) -> None:
            await member.admin.resume()

        await each("resume", mute, resume, self._budget.resume, self._operation)

    async def _resume(
        self, members: list[Member], go_on: Callable[[Member], Awaitable[None]]
    ) -> None:
        """Resumes all; or, in a fleet that is paused, pauses those again that had to answer."""

        async def resume(member: Member) -> None:
            if self._paused_before is None:
                await go_on(member)
            elif not member.admin.probes_while_paused:
                await member.admin.pause(self._paused_before)

        _, failed = await each("resume", members, resume, self._budget.resume, self._operation)
        for member, error in failed.items():
            self._drop(member, f"it did not resume: {error.message}")
        for member in members:
            self._hold(member, False)
        if self._paused_at is not None:
            self._operation.pause_seconds = round(perf_counter() - self._paused_at, 6)

    async def _undo(self, members: list[Member], why: LockstepError) -> None:
        """Everybody back to the version before, proved, and resumed; who cannot is quarantined."""
        left = [member for member in members if member.state == "serving"]

        async def back(member: Member) -> None:
            view = await member.admin.view()
            if view.staged is not None:
                await member.admin.rollback()
                view = await member.admin.view()
            unknown = view.version is None and member in self._swapped
            if unknown or view.version == self._version != member.version:
                await member.admin.rollback()

        done, failed = await each("rollback", left, back, self._budget.commit, self._operation)
        same, wrong = await self._proof.unchanged(done, self._budget.prove, self._operation)
        for member, error in (failed | wrong).items():
            self._drop(member, f"it could not be rolled back: {error.message}")

        async def go_on(member: Member) -> None:
            await member.admin.resume()

        await self._resume(same, go_on)
        self._rolled_back(same, why)

    async def _unstage(self, members: list[Member]) -> None:
        async def drop(member: Member) -> None:
            # With nothing staged, a rollback would undo the commit before.
            if (await member.admin.view()).staged is not None:
                await member.admin.rollback()

        _, failed = await each("rollback", members, drop, self._budget.commit, self._operation)
        for member, error in failed.items():
            self._drop(member, f"what was staged could not be dropped: {error.message}")

    def _require(self, done: list[Member], failed: Failures) -> None:
        if not self._enough(done):
            raise _first(failed, "too few workers are left")

    def _enough(self, members: list[Member]) -> bool:
        """At least half of those that began: a fleet does not shrink to its broken part."""
        return len(members) * 2 >= len(self._members) and bool(members)

    def _drop_lost(self, failed: Failures) -> None:
        for member, error in failed.items():
            if is_lost(error):
                self._drop(member, f"it was lost while staging: {error.message}")

    def _mark_wrong(self, wrong: Failures) -> None:
        for member, error in wrong.items():
            result = self._operation.workers[member.id]
            result.status, result.phase, result.error = "failed", "prove", error.message

    def _rolled_back(self, members: list[Member], why: LockstepError) -> None:
        for member in members:
            if member.state == "serving":
                result = self._operation.workers[member.id]
                result.status, result.error = "rolled_back", result.error or why.message

    def _drop_wrong(self, wrong: Failures) -> None:
        for member, error in wrong.items():
            self._drop(member, f"it did not prove version {self._version!r}: {error.message}")

    def _drop(self, member: Member, reason: str) -> None:
        result = self._operation.workers[member.id]
        result.status, result.error = "quarantined", reason
        self._quarantine(member, reason)
        self._hold(member, False)

    def _failed(self, error: LockstepError) -> UpdateFailed | LockstepError:
        if isinstance(error, CheckpointError):
            return error
        return UpdateFailed(
            f"the update to {self._version!r} was undone on all workers: {error.message}"
        )


def is_lost(error: LockstepError) -> bool:
    """Whether the worker, and not the weights, is to blame."""
    return isinstance(error, Unavailable | DeadlineExceeded | ContractError)


def _first(failed: Failures, otherwise: str) -> LockstepError:
    for member, error in failed.items():
        return error.with_message(f"worker {member.id}: {error.message}")
    return Unavailable(otherwise)
