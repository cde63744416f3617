"""The control side of a Lockstep worker: POST {system_url}/engine/<method>."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Unpack

import msgspec

from lockstep.backends.admin import (
    AdminName,
    Broadcaster,
    PauseMode,
    Source,
    StagedScores,
    WeightContents,
    WorkerView,
)
from lockstep.backends.admin_client import AdminOptions, CallBudget, HttpAdmin
from lockstep.protocol.control import worker as control
from lockstep.tokens.errors import (
    BadLogprob,
    Conflict,
    Misaligned,
    Unavailable,
)
from lockstep.tokens.operation import FetchSummary


class _State(msgspec.Struct):
    version: str
    staged: str | None
    state: str
    running: int
    waiting: int
    adapter_labels: dict[str, str]
    incarnation: str
    weights_id: str
    serves: str | None = None
    generation: int = 0
    gateway: str | None = None


class _Scores(msgspec.Struct):
    logprobs: list[list[float]]


class _StagedScores(_Scores):
    proof: str


class _Contents(msgspec.Struct):
    digest: str | None
    dtype: str | None
    proof: str | None = None
    tensors: dict[str, str] = {}


class LockstepAdmin(HttpAdmin):
    """One Lockstep worker, by the URL and the token of its system port."""

    name: AdminName = "lockstep"
    stages = True
    probes_while_paused = True

    def __init__(self, url: str, token: str | None = None, **options: Unpack[AdminOptions]) -> None:
        super().__init__(url, token, **options)
        self._caller = secrets.token_hex(8)
        self._numbers = count(1)

    async def view(self) -> WorkerView:
        state = await self._state()
        return WorkerView(
            version=state.version,
            staged=state.staged,
            paused=state.state != "running",
            adapters=state.adapter_labels,
            in_flight=state.running + state.waiting,
            incarnation=state.incarnation,
            generation=state.generation,
            gateway=state.gateway,
        )

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        budget = self._budgets.pause
        if mode == "wait":
            # The call returns when the last request ends. A retry would only wait again.
            budget = replace(budget, attempt=budget.total)
        body = control.PauseWorker(
            mode=mode,
            clear_cache=clear_cache,
            sequence_number=self._sequence_number(),
            **self.fencing,
        )
        await self._engine("pause_generation", body, budget, idempotent=True)

    async def resume(self) -> None:
        await self._resume(None)

    async def resume_proved(self, proof: str) -> None:
        """Resume if the worker still serves what `commit_proved` committed. Raises Conflict, and
        stays paused, when other weights took its place or the worker restarted."""
        await self._resume(proof)

    async def _resume(self, proof: str | None) -> None:
        body = control.Resume(proved=proof, sequence_number=self._sequence_number(), **self.fencing)
        await self._engine("resume_generation", body, self._budgets.quick, idempotent=True)

    async def flush(self) -> None:
        await self._engine("flush_cache", self._empty(), self._budgets.quick, idempotent=True)

    # Weights

    async def stage(self, source: Source, version: str) -> FetchSummary | None:
        body = stage_body(source, version, **self.fencing)
        # A broadcast sends its tensors once; any other source can be read again.
        idempotent = source.group is None
        response = await self._engine("stage", body, self._budgets.load, idempotent=idempotent)
        self._client.expect(response.get("staged"), version, "stage")
        fetched = response.get("fetched")
        return None if fetched is None else self._client.convert(FetchSummary, fetched, "stage")

    async def commit(self, version: str) -> None:
        await self._commit(version, None)

    async def commit_proved(self, version: str, proof: str) -> None:
        """Serve exactly the weights that `probe_staged` scored.

        Raises Conflict, with nothing swapped, when other weights are staged now, even under that
        label, or the worker restarted.
        """
        await self._commit(version, proof)

    async def _commit(self, version: str, proof: str | None) -> None:
        async def commit() -> str:
            body = control.Commit(weight_version=version, proved=proof, **self.fencing)
            response = await self._engine("commit", body, self._budgets.commit)
            self._client.expect(response.get("version"), version, "commit")
            return version

        async def look_up() -> str | None:
            state = await self._state()
            if state.staged == version:
                return None
            # The label alone is no evidence: another gateway may have committed other weights
            # under it. With a proof, exactly the proved weights must be served.
            if state.version == version and proof in (None, state.serves):
                return version
            raise Conflict(
                f"{self.url} commit: the response was lost, and now {state.version!r} is served "
                f"and {state.staged!r} staged, not {version!r}: stage it again"
            )

        await self._client.exactly_once("commit", commit, look_up, self._budgets.commit)

    async def rollback(self) -> str | None:
        before = await self._state()

        async def rollback() -> str:
            body = control.Rollback(weights_id=before.weights_id, **self.fencing)
            response = await self._engine("rollback", body, self._budgets.commit)
            return str(response.get("version"))

        async def look_up() -> str | None:
            state = await self._state()
            if state.incarnation != before.incarnation:
                raise Unavailable(f"{self.url} rollback: the worker restarted meanwhile")
            return None if state.weights_id == before.weights_id else state.version

        return await self._client.exactly_once("rollback", rollback, look_up, self._budgets.commit)

    async def probe(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[list[float]]:
        body = control.ProbeRequest(token_ids=[list(ids) for ids in token_ids], lora_name=adapter)
        response = await self._engine("probe", body, self._budgets.probe, idempotent=True)
        scores = self._client.convert(_Scores, response, "probe").logprobs
        check_scores(scores, token_ids, f"{self.url} probe")
        return scores

    async def probe_staged(self, token_ids: Sequence[Sequence[int]]) -> StagedScores:
        """Return the logprobs under the staged weights, and their id for `commit_proved`. The
        worker keeps generating. Raises Conflict when nothing is staged."""
        body = control.ProbeRequest(token_ids=[list(ids) for ids in token_ids], staged=True)
        response = await self._engine("probe", body, self._budgets.probe, idempotent=True)
        scores = self._client.convert(_StagedScores, response, "probe of what is staged")
        check_scores(scores.logprobs, token_ids, f"{self.url} probe of what is staged")
        return StagedScores(scores.logprobs, scores.proof)

    async def contents(self, *, staged: bool = False, tensors: bool = False) -> WeightContents:
        """Return what the worker read. Raises Conflict when nothing is staged."""
        body = control.WeightsDigest(staged=staged, tensors=tensors)
        response = await self._engine("weights_digest", body, self._budgets.quick, idempotent=True)
        contents = self._client.convert(_Contents, response, "weights_digest")
        return WeightContents(
            contents.digest, contents.dtype, contents.proof, contents.tensors, in_memory=True
        )

    async def join_group(self, broadcaster: Broadcaster) -> None:
        body = join_body(broadcaster, **self.fencing)
        budget = CallBudget(broadcaster.seconds + 10.0, 2 * broadcaster.seconds + 20.0)
        try:
            await self._engine("init_weights_update_group", body, budget)
        except Conflict:
            # A trainer that is gone left this group behind, and would hold its name forever.
            leave = control.LeaveGroup(group_name=broadcaster.group, **self.fencing)
            await self._engine("destroy_weights_update_group", leave, self._budgets.quick)
            await self._engine("init_weights_update_group", body, budget)

    # Adapters

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> str:
        body = control.LoadLora(lora_name=name, lora_path=str(path), version=label, **self.fencing)

        async def load() -> str:
            response = await self._engine("load_lora_adapter", body, self._budgets.load)
            return str(response.get("label"))

        async def look_up() -> None:
            # A label in the view may be that of earlier contents. Loading again is safe: the same
            # name from the same path ends in the same state.
            await self._state()

        return await self._client.exactly_once(
            "load_lora_adapter", load, look_up, self._budgets.load
        )

    async def unload_adapter(self, name: str) -> None:
        body = control.UnloadLora(lora_name=name, **self.fencing)

        async def unload() -> bool:
            await self._engine("unload_lora_adapter", body, self._budgets.quick)
            return True

        async def look_up() -> bool | None:
            return None if name in (await self._state()).adapter_labels else True

        await self._client.exactly_once("unload_lora_adapter", unload, look_up, self._budgets.quick)

    def _sequence_number(self) -> control.SequenceNumber:
        return control.SequenceNumber(caller=self._caller, number=next(self._numbers))

    def _empty(self) -> control.EmptyBody:
        return control.EmptyBody(**self.fencing)

    async def _state(self) -> _State:
        response = await self._engine("liveness_probe", {}, self._budgets.quick, idempotent=True)
        return self._client.convert(_State, response, "liveness_probe")

    async def _engine(
        self, method: str, body: object, budget: CallBudget, *, idempotent: bool = False
    ) -> dict[str, Any]:
        return await self._client.command(f"/engine/{method}", body, budget, idempotent=idempotent)


def stage_body(source: Source, version: str, **fencing: Any) -> control.Stage:
    """Return the body of `stage`."""
    return control.Stage(
        model_path=None if source.directory is None else str(source.directory),
        shared_name=source.shared,
        group_name=source.group,
        tensors=control.placed(source.tensors),
        partial=source.partial,
        weight_version=version,
        **fencing,
    )


def join_body(broadcaster: Broadcaster, **fencing: Any) -> control.JoinGroup:
    """Return the body of `init_weights_update_group`."""
    return control.JoinGroup(
        master_address=broadcaster.host,
        master_port=broadcaster.port,
        rank=broadcaster.rank,
        world_size=broadcaster.world_size,
        group_name=broadcaster.group,
        backend=broadcaster.backend,
        timeout_seconds=broadcaster.seconds,
        **fencing,
    )


def check_scores(
    scores: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]], what: str
) -> None:
    """Raise Misaligned or BadLogprob unless there is one finite score per token but the first."""
    got = [len(row) for row in scores]
    expected = [len(ids) - 1 for ids in token_ids]
    if got != expected:
        raise Misaligned(f"{what}: got {got} logprobs for sequences that need {expected}")
    if not all(math.isfinite(value) for row in scores for value in row):
        raise BadLogprob(f"{what}: a logprob is not a finite number")
