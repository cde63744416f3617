"""The control side of a vLLM 0.32 server that was started with VLLM_SERVER_DEV_MODE=1."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

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
from lockstep.backends.vllm.adapter_calls import AdapterCalls
from lockstep.backends.vllm.collective_rpc import ExtensionClient, ExtensionView, collective_rpc
from lockstep.backends.vllm.transport import VllmTransport
from lockstep.protocol.control.read_back import ReadBack
from lockstep.tokens.errors import (
    Conflict,
    ContractError,
    EngineFailure,
    UnsupportedField,
)

INITIAL_VERSION = "default"


class VllmAdmin(HttpAdmin):
    """One vLLM server. `detect` must run first: with the Lockstep worker extension it can stage and
    score.

    Without it nothing can be staged: `commit` loads while the server is paused, and a server whose
    load failed is not resumed, as it would crash in its next forward pass. vLLM queues requests
    while it is paused, so then only the extension can score a probe.
    """

    name: AdminName = "vllm"

    def __init__(self, url: str, token: str | None = None, **options: Unpack[AdminOptions]) -> None:
        super().__init__(url, token, **options)
        self._extension_view: ExtensionView | None = None
        self._extension = ExtensionClient(
            self._client, self._budgets, self._quiet, self._label, lambda: self.fencing
        )
        self._reloads = ReloadedWeights(self.url, self._load, self._check_paused)
        self._adapters = AdapterCalls(self._client, self._budgets, "/v1/load_lora_adapter")

    @property
    def stages(self) -> bool:
        return self._extension_view is not None

    @property
    def probes_while_paused(self) -> bool:
        return self._extension_view is not None and self._extension_view.probes

    async def detect(self) -> None:
        """Detect the extension. Call it before first use, and after the server was restarted."""
        self._extension_view = await self._extension.detect()

    async def view(self) -> WorkerView:
        if self._extension_view is not None:
            self._extension_view = await self._extension.view()
        response = self._client.decode_object(await self._get("/weight_info"), "/weight_info")
        label = response.get("weight_version")
        version = label if isinstance(label, str) else None
        cards = await self._adapters.cards()
        if self._extension_view is not None:
            version, staged = self._extension_view.version or version, self._extension_view.staged
        else:
            # Until the first update, the server has the weights it was started with.
            root = next((card.root for card in cards if card.parent is None), None)
            first = Source(directory=Path(root)) if root and version == INITIAL_VERSION else None
            self._reloads.observe(version, first)
            version, staged = self._reloads.version, self._reloads.staged
        return WorkerView(
            version=version,
            staged=staged,
            paused=await self._is_paused(),
            adapters=self._adapters.labels(cards),
            generation=self._extension_view.generation if self._extension_view else 0,
            gateway=self._extension_view.gateway if self._extension_view else None,
        )

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        budget = self._budgets.pause
        if mode == "wait":
            budget = replace(budget, attempt=budget.total)
        path = f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}"
        response = await self._json(path, None, budget, idempotent=True)
        self._client.expect(response.get("status"), "paused", "/pause")
        self._client.expect(await self._is_paused(), True, "/is_paused after /pause")

    async def resume(self) -> None:
        self._reloads.check_whole()
        response = await self._json("/resume", None, self._budgets.quick, idempotent=True)
        self._client.expect(response.get("status"), "resumed", "/resume")
        self._client.expect(await self._is_paused(), False, "/is_paused after /resume")

    async def flush(self, *, running_too: bool = False) -> None:
        """Drop cached prefixes. Raises Conflict when running requests hold some of them, unless
        `running_too`: then their prefixes are computed anew."""
        path = "/reset_prefix_cache"
        response = await self._json(path, None, self._budgets.quick, idempotent=True)
        if response.get("success") is not True and running_too:
            path += "?reset_running_requests=true"
            response = await self._json(path, None, self._budgets.quick, idempotent=True)
        if response.get("success") is not True:
            raise Conflict(
                f"{self.url} {path} returned {response}: requests hold cached prefixes; pause with "
                "abort or wait first, or flush with running_too"
            )

    # Weights

    async def stage(self, source: Source, version: str) -> None:
        if self._extension_view is not None:
            await self._extension.stage(source, version)
        else:
            self._reloads.stage(source, version)

    async def commit(self, version: str) -> None:
        if self._extension_view is not None:
            await self._extension.commit(version)
        else:
            await self._reloads.commit(version)

    async def rollback(self) -> str | None:
        if self._extension_view is not None:
            return await self._extension.rollback()
        return await self._reloads.rollback()

    async def probe(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[list[float]]:
        if not await self._is_paused():
            budget, transport = (
                self._budgets.probe,
                VllmTransport(self._client.http, lockstep=False),
            )
            scores = [
                await score(self._client, transport, ids, adapter, budget) for ids in token_ids
            ]
        elif self.probes_while_paused and adapter is None:
            scores = await self._extension.probe(token_ids)
        else:
            raise UnsupportedField(
                f"{self.url} is paused, and vLLM queues requests meanwhile: resume it without "
                "traffic to probe it, or load the Lockstep worker extension (which cannot score "
                "adapters)",
                param="probe",
            )
        check_scores(scores, token_ids, f"{self.url} probe")
        return scores

    async def contents(self, *, staged: bool = False, tensors: bool = False) -> WeightContents:
        """Return what the extension read; empty for a server without it, or with an older one."""
        if self._extension_view is None or not self._extension_view.digests:
            return WeightContents()
        return await self._extension.contents(staged=staged, tensors=tensors)

    async def read_back(
        self, *, adapter: str | None = None, path: Path | None = None
    ) -> ReadBack | None:
        if self._extension_view is None or not self._extension_view.reads_back:
            return None
        return await self._extension.read_back(adapter, path)

    async def join_group(self, broadcaster: Broadcaster) -> None:
        if self._extension_view is not None:
            await self._extension.join_group(broadcaster)
            return
        info = {
            "master_address": broadcaster.host,
            "master_port": broadcaster.port,
            "rank_offset": broadcaster.rank,
            "world_size": broadcaster.world_size,
        }
        budget = CallBudget(broadcaster.seconds + 10.0, broadcaster.seconds + 10.0)
        await self._step("/init_weight_transfer_engine", {"init_info": info}, budget)

    # Adapters

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> str:
        loaded = await self._adapters.load(name, path, label)
        # vLLM caches prefixes by the adapter's path: new contents would use old prefixes.
        await self.flush(running_too=True)
        return loaded

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name)

    async def check_proved_beside_traffic(self) -> None:
        """Raise BadRequest for a server on which adapters cannot be proved while it samples."""
        await self._adapters.check_proved_beside_traffic()

    # Parts

    async def _load(self, source: Source, version: str) -> None:
        budget = self._budgets.load
        if source.directory is not None:
            kwargs = {"weights_path": str(source.directory)}
            # Loading the same directory twice is safe while the server is paused.
            await self._client.exactly_once(
                "reload_weights",
                lambda: collective_rpc(self._client, "reload_weights", kwargs, budget),
                self._check_paused,
                budget,
            )
        else:
            info = {
                "names": [spec.name for spec in source.tensors],
                "dtype_names": [spec.dtype for spec in source.tensors],
                "shapes": [list(spec.shape) for spec in source.tensors],
            }
            await self._step("/start_weight_update", None, budget)
            await self._step("/update_weights", {"update_info": info}, budget)
            await self._step("/finish_weight_update", {"weight_version": version}, budget)
        await self._label(version)

    @asynccontextmanager
    async def _quiet(self) -> AsyncIterator[None]:
        """Keep the server paused while the block runs. Otherwise tokens would be sampled between
        the swap and its label, under the wrong version."""
        if await self._is_paused():
            yield
            return
        await self.pause("keep")
        try:
            yield
        finally:
            # Raises when the weights are lost. Then the server must stay paused.
            await self._extension.view()
            await self.resume()

    async def _check_paused(self) -> None:
        """Raise Conflict unless paused: a running server crashes when its weights change."""
        if self._extension_view is None and self._reloads.version is None:
            await self.view()
        if not await self._is_paused():
            raise Conflict(f"{self.url} is not paused: pause it before its weights are changed")

    async def _label(self, version: str) -> None:
        path = "/update_weight_version"
        response = await self._json(
            path, {"new_version": version}, self._budgets.quick, idempotent=True
        )
        self._client.expect(response.get("success"), True, path)
        info = self._client.decode_object(await self._get("/weight_info"), "/weight_info")
        self._client.expect(info.get("weight_version"), version, "/weight_info")
        await self.flush(running_too=True)

    async def _is_paused(self) -> bool:
        response = self._client.decode_object(await self._get("/is_paused"), "/is_paused")
        paused = response.get("is_paused")
        if not isinstance(paused, bool):
            raise ContractError(f"{self.url} /is_paused reports no boolean: {paused!r}")
        return paused

    async def _get(self, path: str) -> bytearray:
        return await self._client.get(path, self._budgets.quick)

    async def _json(
        self, path: str, body: object, budget: CallBudget, *, idempotent: bool = False
    ) -> dict[str, Any]:
        raw = await self._client.post(path, body, budget, idempotent=idempotent)
        return self._client.decode_object(raw, path)

    async def _step(self, path: str, body: object, budget: CallBudget) -> None:
        """Send one step of a weight transfer, which the server confirms with a `message`."""
        response = await self._json(path, body, budget)
        if not response.get("message") or "error" in response:
            raise EngineFailure(f"{self.url} {path} failed: {response}")
