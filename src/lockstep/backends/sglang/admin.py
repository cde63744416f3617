"""The control side of an SGLang server, which has it on the port of its data side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import msgspec

from lockstep.backends.admin import (
    AdminName,
    Broadcaster,
    PauseMode,
    Source,
    WeightContents,
    WorkerView,
)
from lockstep.backends.admin_client import AdminOptions, CallBudget, HttpAdmin
from lockstep.backends.lockstep.admin import check_scores
from lockstep.backends.reload_weights import ReloadedWeights
from lockstep.backends.scoring import score
from lockstep.backends.sglang.adapter_calls import SglangAdapterCalls
from lockstep.backends.sglang.assembled import AssembledCheckpoint
from lockstep.backends.sglang.held_weights import HeldComparison, compare
from lockstep.backends.sglang.server import SERVER_INFO, StartArguments, decode_server_info
from lockstep.backends.sglang.transport import SglangTransport
from lockstep.protocol.control.read_back import ReadBack
from lockstep.tokens.errors import (
    BadRequest,
    CheckpointError,
    Conflict,
    EngineFailure,
    Unavailable,
    UnsupportedField,
)

INITIAL_VERSION = "default"
MODEL_INFO = "/model_info"
READY = "/ready"
PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
FLUSH = "/flush_cache"
UPDATE = "/update_weights_from_disk"
CHECKER = "/weights_checker"
PAUSES = {"keep": "retract", "wait": "retract", "abort": "abort"}
"""SGLang's pause for each of ours. `retract` drops the KV of running requests and computes it again
after the pause; with `in_place` they would go on with the KV of the old weights."""


class _ModelInfo(msgspec.Struct):
    model_path: str
    weight_version: str | None = None


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class _Checksums(msgspec.Struct):
    ranks: list[_Rank] = []


class SglangAdmin(HttpAdmin):
    """One SGLang server. Nothing can be staged: `commit` loads while the server is paused.

    The response to an update is not believed, because SGLang reports success for a checkpoint with
    missing or misshapen tensors. On a CPU `read_back` compares the checksum of every parameter to
    the checkpoint's. SGLang queues requests while it is paused, so it must be resumed to be probed.
    """

    name: AdminName = "sglang"
    stages = False
    probes_while_paused = False

    def __init__(self, url: str, token: str | None = None, **options: Unpack[AdminOptions]) -> None:
        super().__init__(url, token, **options)
        self._reloads = ReloadedWeights(self.url, self._load, self._check_paused)
        self._adapters = SglangAdapterCalls(self._client, self._budgets)
        self._assembled: AssembledCheckpoint | None = None
        self._incarnation: str | None = None
        self._held: tuple[tuple[Path, tuple[tuple[str, str], ...]], HeldComparison] | None = None

    async def view(self) -> WorkerView:
        await self._notice_restart()
        info = await self._model_info()
        # Until the first update, the server has the weights it was started with.
        initial = info.weight_version == INITIAL_VERSION
        first = Source(directory=Path(info.model_path)) if initial else None
        self._reloads.observe(info.weight_version, first)
        return WorkerView(
            version=self._reloads.version,
            staged=self._reloads.staged,
            paused=await self._is_paused(),
            adapters=self._adapters.labels(await self._adapters.cards()),
            incarnation=self._incarnation,
        )

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        if mode == "wait":
            await self._drain()
        body = {"mode": PAUSES[mode]}
        await self._confirmed(PAUSE, body, self._budgets.pause)
        self._client.expect(await self._is_paused(), True, f"{READY} after {PAUSE}")
        if clear_cache:
            await self.flush()

    async def resume(self) -> None:
        self._reloads.check_whole()
        await self._confirmed(CONTINUE, {}, self._budgets.quick)
        self._client.expect(await self._is_paused(), False, f"{READY} after {CONTINUE}")

    async def flush(self) -> None:
        """Drop cached prefixes. Raises Conflict while requests run: they hold some of them."""
        try:
            await self._client.post(FLUSH, None, self._budgets.quick, idempotent=True)
        except BadRequest as error:
            raise Conflict(
                f"{error.message.strip()}: requests hold cached prefixes; pause the server first"
            ) from None

    # Weights

    async def stage(self, source: Source, version: str) -> None:
        if source.directory is None:
            raise UnsupportedField(
                f"{self.url} is an SGLang server, and takes weights from a directory only: give "
                "one",
                param="source",
            )
        self._reloads.stage(source, version)

    async def commit(self, version: str) -> None:
        await self._reloads.commit(version)

    async def rollback(self) -> str | None:
        return await self._reloads.rollback()

    async def probe(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[list[float]]:
        if await self._is_paused():
            raise UnsupportedField(
                f"{self.url} is paused, and SGLang queues requests meanwhile: resume it without "
                "traffic to probe it",
                param="probe",
            )
        budget = self._budgets.probe
        # A new one: an adapter that was just loaded is not in the model list of an older one.
        transport = SglangTransport(self._client.http)
        scores = [await score(self._client, transport, ids, adapter, budget) for ids in token_ids]
        check_scores(scores, token_ids, f"{self.url} probe")
        return scores

    async def contents(self, *, staged: bool = False, tensors: bool = False) -> WeightContents:
        """Return the digest of the checkpoint whose weights it computes with, by checksums."""
        info = await self._server_info()
        held = None if staged else await self._compare(info)
        return WeightContents(digest=None if held is None else held.digest, dtype=info.dtype)

    async def read_back(
        self, *, adapter: str | None = None, path: Path | None = None
    ) -> ReadBack | None:
        """Return the comparison of checksums for the live weights. Adapters have no checksums."""
        if adapter is not None:
            return None
        held = await self._compare(await self._server_info())
        return None if held is None else held.report

    async def join_group(self, broadcaster: Broadcaster) -> None:
        raise UnsupportedField(
            f"{self.url} is an SGLang server: Lockstep updates it from directories, and does not "
            "send it broadcasts",
            param="broadcaster",
        )

    # Adapters

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> str:
        return await self._adapters.load(name, path, label)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name)

    async def close(self) -> None:
        if self._assembled is not None:
            self._assembled.remove()
        await super().close()

    # Parts

    async def _notice_restart(self) -> None:
        """Forget what was loaded into an earlier process, which may have died while it loaded."""
        incarnation = (await self._server_info()).incarnation
        if self._incarnation not in (None, incarnation):
            self._reloads.forget()
        self._incarnation = incarnation

    async def _load(self, source: Source, version: str) -> None:
        if not isinstance(source.directory, Path):
            raise UnsupportedField(f"{self.url} takes weights from a directory only")
        assembled = await asyncio.to_thread(AssembledCheckpoint.of, source.directory, self.url)
        # Repeating it is safe: the server is paused, and loads the same files again.
        body = {"model_path": str(assembled.path), "weight_version": version, "flush_cache": True}
        try:
            await self._confirmed(UPDATE, body, self._budgets.load)
        except BaseException:
            assembled.remove()
            raise
        # The server may read the files again: keep them as long as their weights are served.
        previous, self._assembled = self._assembled, assembled
        if previous is not None:
            previous.remove()
        self._held = None
        info = await self._model_info()
        self._client.expect(info.weight_version, version, f"weight_version after {UPDATE}")
        self._client.expect(info.model_path, str(assembled.path), f"model_path after {UPDATE}")
        await self.flush()

    async def _drain(self) -> None:
        """Wait until no request runs. New ones must be held back meanwhile."""
        # The route waits on the server, and drops the cache then.
        seconds = self._budgets.pause.total
        budget = CallBudget(seconds + 5.0, seconds + 5.0)
        try:
            await self._client.post(f"{FLUSH}?timeout={seconds:g}", None, budget)
        except BadRequest as error:
            raise Unavailable(
                f"{self.url}: requests were still running after {seconds:g} s "
                f"({error.message.strip()}): pause it with abort or keep"
            ) from None

    async def _compare(self, info: StartArguments) -> HeldComparison | None:
        """Compare checksums to the checkpoint it should hold; None where that is not possible."""
        await self.view()
        source = self._reloads.source
        # On a GPU SGLang computes another checksum; with tensor parallelism it has one per part.
        directory = None if source is None else source.directory
        if info.device != "cpu" or info.tp_size != 1:
            return None
        if not isinstance(directory, Path) or not directory.is_dir():
            return None
        raw = await self._client.post(
            CHECKER, {"action": "checksum"}, self._budgets.load, idempotent=True
        )
        fields = self._client.decode_object(raw, CHECKER)
        ranks = self._client.convert(_Checksums, fields, CHECKER).ranks
        if len(ranks) != 1:
            return None
        case = (directory, tuple(sorted(ranks[0].checksums.items())))
        if self._held is None or self._held[0] != case:
            try:
                held = await asyncio.to_thread(
                    compare, directory, info.dtype or "", ranks[0].checksums
                )
            except CheckpointError as error:
                raise error.with_message(f"{self.url} read-back: {error.message}") from None
            self._held = case, held
        return self._held[1]

    async def _check_paused(self) -> None:
        """Raise Conflict unless paused: requests would mix old and new weights."""
        if self._reloads.version is None:
            await self.view()
        if not await self._is_paused():
            raise Conflict(f"{self.url} is not paused: pause it before its weights are changed")

    async def _is_paused(self) -> bool:
        """Return whether the server queues requests. It reports no more than that it is not
        ready."""
        try:
            await self._client.get(READY, replace(self._budgets.quick, tries=1))
        except Unavailable:
            await self._model_info()  # raises Unavailable for a server that does not respond at all
            return True
        return False

    async def _model_info(self) -> _ModelInfo:
        raw = await self._client.get(MODEL_INFO, self._budgets.quick)
        fields = self._client.decode_object(raw, MODEL_INFO)
        return self._client.convert(_ModelInfo, fields, MODEL_INFO)

    async def _server_info(self) -> StartArguments:
        return decode_server_info(await self._client.get(SERVER_INFO, self._budgets.quick))

    async def _confirmed(self, path: str, body: object, budget: CallBudget) -> dict[str, Any]:
        """Send a command that may be repeated. Raises EngineFailure unless the server confirms
        it."""
        try:
            raw = await self._client.post(path, body, budget, idempotent=True)
        except BadRequest as error:
            raise EngineFailure(error.message) from None
        fields = self._client.decode_object(raw, path)
        if fields.get("success") is not True and fields.get("status") != "ok":
            raise EngineFailure(f"{self.url} {path} failed: {fields.get('message')}")
        return fields
