"""The control side of a Dynamo worker: POST {system_url}/engine/<route>, where advertised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from lockstep.backends.admin_client import AdminClient, AdminOptions, CallBudget, HttpAdmin
from lockstep.backends.lockstep.admin import LockstepAdmin, join_body
from lockstep.backends.reload_weights import ReloadedWeights
from lockstep.protocol.common.decode_error import stated_error
from lockstep.protocol.control import worker as control
from lockstep.tokens.errors import (
    AdapterError,
    BadRequest,
    Conflict,
    EngineFailure,
    UnsupportedField,
)
from lockstep.tokens.operation import FetchSummary

TRANSACTION = frozenset({"stage", "commit", "rollback", "probe", "liveness_probe"})
"""Routes that a Lockstep engine behind Dynamo advertises beside Dynamo's own."""


class DynamoAdmin(HttpAdmin):
    """One Dynamo worker, by its system URL and the routes that discovery lists for it.

    dynamo.vllm cannot stage or score: there `commit` loads while paused, and proving needs the data
    plane. It does not list its adapters either: the view has those loaded by this driver.
    """

    name: AdminName = "dynamo"

    def __init__(
        self,
        url: str,
        routes: Iterable[str],
        token: str | None = None,
        **options: Unpack[AdminOptions],
    ) -> None:
        super().__init__(url, token, **options)
        self.routes = frozenset(routes)
        self._own: LockstepAdmin | None = None
        if self.routes >= TRANSACTION:
            self._own = _Advertised(url, token, **options)
        self._reloads = ReloadedWeights(self.url, self._load, self._ready, untouched=(Conflict,))
        self._adapters: dict[str, str] = {}

    def fence(self, generation: Callable[[], int], gateway: str) -> None:
        """Send the generation to a Lockstep engine behind Dynamo. Other engines obey every
        gateway."""
        super().fence(generation, gateway)
        if self._own is not None:
            self._own.fence(generation, gateway)

    @property
    def stages(self) -> bool:
        return self._own is not None

    @property
    def probes_while_paused(self) -> bool:
        return self._own is not None

    async def view(self) -> WorkerView:
        if self._own is not None:
            return await self._own.view()
        if "liveness_probe" in self.routes:
            await self._engine("liveness_probe", {}, self._budgets.quick, idempotent=True)
        version = None
        if "get_weight_version" in self.routes:
            self._reloads.observe(await self._version())
            version = self._reloads.version
        return WorkerView(
            version=version, staged=self._reloads.staged, adapters=dict(self._adapters)
        )

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        budget = self._budgets.pause
        if mode == "wait":
            budget = replace(budget, attempt=budget.total)
        body = self._with_generation({"mode": mode, "clear_cache": clear_cache})
        response = await self._engine("pause_generation", body, budget, idempotent=True)
        if "mode" in response:
            self._client.expect(response["mode"], mode, "pause_generation")

    async def resume(self) -> None:
        self._reloads.check_whole()
        await self._engine(
            "resume_generation", self._with_generation({}), self._budgets.quick, idempotent=True
        )

    async def flush(self) -> None:
        await self._engine(
            "flush_cache", self._with_generation({}), self._budgets.quick, idempotent=True
        )

    async def abort(self, *request_ids: str) -> int | None:
        """Abort requests by Dynamo's ids; return how many were running. dynamo.vllm does not
        report that, and engines without the route abort nothing."""
        if "abort_request" not in self.routes:
            return None
        counts = [await self._abort(request_id) for request_id in request_ids]
        return None if None in counts else sum(count or 0 for count in counts)

    async def _abort(self, request_id: str) -> int | None:
        # Without a generation: aborting is no change of the fleet, so a follower may do it too.
        body = {"request_id": request_id}
        response = await self._engine("abort_request", body, self._budgets.quick, idempotent=True)
        count = response.get("aborted")
        return count if isinstance(count, int) else None

    # Weights

    async def stage(self, source: Source, version: str) -> FetchSummary | None:
        if self._own is not None:
            return await self._own.stage(source, version)
        self._require_route(_update_route(source))
        self._reloads.stage(source, version)
        return None

    async def commit(self, version: str) -> None:
        if self._own is not None:
            await self._own.commit(version)
        else:
            await self._reloads.commit(version)

    async def rollback(self) -> str | None:
        if self._own is not None:
            return await self._own.rollback()
        return await self._reloads.rollback()

    async def probe(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[list[float]]:
        if self._own is None:
            self._require_route("probe")
            raise UnsupportedField(
                f"{self.url} advertises probe without {', '.join(sorted(TRANSACTION))}",
                param="probe",
            )
        return await self._own.probe(token_ids, adapter=adapter)

    async def contents(self, *, staged: bool = False, tensors: bool = False) -> WeightContents:
        """Return what a Lockstep engine behind Dynamo read; other engines do not report it."""
        if self._own is None or "weights_digest" not in self.routes:
            return WeightContents()
        return await self._own.contents(staged=staged, tensors=tensors)

    async def join_group(self, broadcaster: Broadcaster) -> None:
        self._require_route("init_weights_update_group")
        if self._own is not None:
            await self._own.join_group(broadcaster)
            return
        budget = CallBudget(broadcaster.seconds + 10.0, broadcaster.seconds + 10.0)
        body = msgspec.to_builtins(join_body(broadcaster))
        await self._engine("init_weights_update_group", body, budget)

    # Adapters

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> str:
        if self._own is not None and "load_lora" not in self.routes:
            self._require_route("load_lora_adapter")
            return await self._own.load_adapter(name, path, label)
        self._require_route("load_lora")
        if not path.is_absolute():
            raise BadRequest(f"path is {str(path)!r}: expected an absolute one", param="path")

        async def load() -> bool:
            body = {"lora_name": name, "source": {"uri": path.as_uri()}}
            response = await self._engine("load_lora", body, self._budgets.load)
            return self._is_swapped(name, response)

        async def look_up() -> None:
            # No route reports what is loaded; the response to a second load has `hot_swap`.
            if "liveness_probe" in self.routes:
                await self._engine("liveness_probe", {}, self._budgets.quick, idempotent=True)

        try:
            if not await self._client.exactly_once("load_lora", load, look_up, self._budgets.load):
                # Without hot swap the old contents stay, although the response reports success.
                await self.unload_adapter(name)
                await self._client.exactly_once("load_lora", load, look_up, self._budgets.load)
        except (EngineFailure, Conflict) as error:
            raise AdapterError(error.message, param="path") from None
        self._adapters[name] = label or ""
        return label or ""

    async def unload_adapter(self, name: str) -> None:
        if self._own is not None and "unload_lora" not in self.routes:
            self._require_route("unload_lora_adapter")
            await self._own.unload_adapter(name)
            return
        await self._engine("unload_lora", {"lora_name": name}, self._budgets.quick)
        self._adapters.pop(name, None)

    async def close(self) -> None:
        await super().close()
        if self._own is not None:
            await self._own.close()

    # Parts

    def _is_swapped(self, name: str, response: dict[str, Any]) -> bool:
        """Return whether the adapter has the new contents now."""
        loaded = name in self._adapters or "already" in str(response.get("message", "")).lower()
        return response.get("hot_swap") is True or not loaded

    async def _load(self, source: Source, version: str) -> None:
        route, budget = _update_route(source), self._budgets.load
        if source.directory is None:
            body: object = control.FromGroup(
                names=[spec.name for spec in source.tensors],
                dtypes=[spec.dtype for spec in source.tensors],
                shapes=[list(spec.shape) for spec in source.tensors],
                weight_version=version,
                group_name=source.group or "",
            )
            response = await self._engine(route, body, budget)
            self._client.expect(response.get("version"), version, route)
            return

        before = await self._version() if "get_weight_version" in self.routes else version

        async def load() -> object:
            body = control.FromDisk(model_path=str(source.directory), weight_version=version)
            return (await self._engine(route, body, budget)).get("version")

        async def look_up() -> object:
            # The label shows that the load happened only if it was another one before. Otherwise
            # the load is repeated: harmless while paused, and refused by a worker that is not.
            if before == version:
                return None
            now = await self._version()
            return now if now == version else None

        loaded = await self._client.exactly_once(route, load, look_up, budget)
        self._client.expect(loaded, version, route)

    async def _ready(self) -> None:
        """Do nothing: Dynamo's worker itself refuses an update unless it is paused."""

    async def _version(self) -> str | None:
        response = await self._engine(
            "get_weight_version", {}, self._budgets.quick, idempotent=True
        )
        version = response.get("version")
        return None if version is None else str(version)

    def _with_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        return body if self._own is None else {**body, **self.fencing}

    def _require_route(self, route: str) -> None:
        if route not in self.routes:
            raise UnsupportedField(
                f"{self.url} does not advertise the route {route!r}; it has "
                f"{', '.join(sorted(self.routes)) or 'none'}",
                param=route,
            )

    async def _engine(
        self, route: str, body: object, budget: CallBudget, *, idempotent: bool = False
    ) -> dict[str, Any]:
        self._require_route(route)
        return await self._client.command(f"/engine/{route}", body, budget, idempotent=idempotent)


class _ReasonClient(AdminClient):
    """A client that takes the error from its stable `reason`, and not from its words."""

    def check_status(self, body: bytes | bytearray, what: str) -> dict[str, Any]:
        fields = self.decode_object(body, what)
        if fields.get("status") == "error":
            error = stated_error(fields, f"{self.url} {what}: {fields.get('message')}")
            if error is not None:
                raise error
        return super().check_status(body, what)


class _Advertised(LockstepAdmin):
    """A Lockstep worker whose routes are served by Dynamo, which sends errors with status 200."""

    client_class = _ReasonClient


def _update_route(source: Source) -> str:
    if source.group is not None:
        return "update_weights_from_distributed"
    return "update_weights_from_disk"
