"""The control side of prime-rl's inference server, which is vLLM with routes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Unpack

from lockstep.backends.admin import AdminName, Broadcaster, PauseMode, Source, WorkerView
from lockstep.backends.admin_client import AdminOptions, CallBudget, HttpAdmin
from lockstep.backends.lockstep.admin import check_scores
from lockstep.backends.reload_weights import ReloadedWeights
from lockstep.backends.scoring import score
from lockstep.backends.vllm.adapter_calls import AdapterCalls
from lockstep.backends.vllm.transport import VllmTransport
from lockstep.tokens.errors import (
    Conflict,
    ContractError,
    EngineFailure,
    NotFound,
    UnsupportedField,
)

PAUSE = "/pause?mode=keep&clear_cache=false"


class PrimeAdmin(HttpAdmin):
    """One inference server of prime-rl. It reports neither its version nor whether it is paused.

    It only pauses with `keep`, and does not drop prefixes cached under older weights by itself:
    where it has no /reset_prefix_cache, requests must carry a cache salt for each version.
    """

    name: AdminName = "prime-rl"
    stages = False
    probes_while_paused = False

    def __init__(self, url: str, token: str | None = None, **options: Unpack[AdminOptions]) -> None:
        super().__init__(url, token, **options)
        self._paused = False
        self._reloads = ReloadedWeights(self.url, self._load, self._ready)
        self._adapters = AdapterCalls(self._client, self._budgets, "/load_lora_adapter")

    async def view(self) -> WorkerView:
        raw = await self._client.get("/liveness", self._budgets.quick)
        self._client.check_status(raw, "/liveness")
        adapters = self._adapters.labels(await self._adapters.cards())
        return WorkerView(version=None, staged=self._reloads.staged, adapters=adapters)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        if mode != "keep" or clear_cache:
            raise UnsupportedField(
                f"{self.url} cannot pause with mode {mode!r} and clear_cache {clear_cache}: "
                "prime-rl's server only supports keep, without clear_cache",
                param="mode",
            )
        # Unknown until the server confirms it: a load is refused meanwhile, a resume is not.
        self._paused = False
        self._check_done(
            await self._client.post(PAUSE, None, self._budgets.pause, idempotent=True), PAUSE
        )
        self._paused = True

    async def resume(self) -> None:
        self._reloads.check_whole()
        path = "/resume"
        self._check_done(
            await self._client.post(path, None, self._budgets.quick, idempotent=True), path
        )
        self._paused = False

    async def flush(self, *, running_too: bool = False) -> None:
        """Drop cached prefixes. Raises UnsupportedField where the server has no such route."""
        path = "/reset_prefix_cache" + "?reset_running_requests=true" * running_too
        try:
            raw = await self._client.post(path, None, self._budgets.quick, idempotent=True)
        except NotFound:
            raise UnsupportedField(
                f"{self.url} has no {path}: salt the cache of each version instead", param="flush"
            ) from None
        response = self._client.decode_object(raw, path)
        if response.get("success") is not True:
            raise Conflict(f"{self.url} {path} returned {response}: requests hold cached prefixes")

    # Weights

    async def stage(self, source: Source, version: str) -> None:
        self._reloads.stage(source, version)

    async def commit(self, version: str) -> None:
        await self._reloads.commit(version)

    async def rollback(self) -> str | None:
        return await self._reloads.rollback()

    async def probe(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[list[float]]:
        if self._paused:
            raise UnsupportedField(
                f"{self.url} is paused, and queues requests meanwhile: resume it without traffic "
                "to probe it",
                param="probe",
            )
        budget, transport = self._budgets.probe, VllmTransport(self._client.http, lockstep=False)
        scores = [await score(self._client, transport, ids, adapter, budget) for ids in token_ids]
        check_scores(scores, token_ids, f"{self.url} probe")
        return scores

    async def join_group(self, broadcaster: Broadcaster) -> None:
        # prime-rl counts ranks of the inference side only; rank 0 of the group is the trainer.
        body = {
            "host": broadcaster.host,
            "port": broadcaster.port,
            "rank_offset": broadcaster.rank - 1,
            "inference_world_size": broadcaster.world_size - 1,
            "timeout": int(broadcaster.seconds),
        }
        budget = CallBudget(broadcaster.seconds + 10.0, broadcaster.seconds + 10.0)
        await self._client.command("/init_broadcaster", body, budget)

    # Adapters

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> str:
        return await self._adapters.load(name, path, label)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name)

    async def _load(self, source: Source, version: str) -> None:
        path = "/update_weights"
        budget = self._budgets.load
        if source.directory is None:
            # The trainer sends once: a second receive would wait forever.
            await self._client.command(path, {"weight_dir": None}, budget)
        else:
            body = {"weight_dir": str(source.directory)}
            await self._client.command(path, body, budget, idempotent=True)
        with suppress(UnsupportedField):  # then requests carry a salt, see the class docstring
            await self.flush(running_too=True)

    async def _ready(self) -> None:
        if not self._paused:
            raise Conflict(f"{self.url} is not paused by this driver: pause it before an update")

    def _check_done(self, raw: bytearray, path: str) -> None:
        fields = self._client.decode_object(raw, path)
        if fields.get("status") not in ("ok", "success", "paused", "resumed"):
            if "error" in fields or fields.get("status") == "error":
                raise EngineFailure(f"{self.url} {path} failed: {fields}")
            raise ContractError(f"{self.url} {path} does not confirm that it was done: {fields}")
