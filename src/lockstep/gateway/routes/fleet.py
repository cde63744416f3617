"""The fleet over HTTP: state, pauses, weight updates, adapters, workers, operations."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.backends.admin import Source, TensorSpec
from lockstep.backends.admin_registry import open_admin
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.state_view import fleet_state, worker_views
from lockstep.gateway.context import GatewayContext
from lockstep.http.handlers import json_response, read_json
from lockstep.protocol.common.strict import decode
from lockstep.protocol.control import fleet as wire
from lockstep.tokens.errors import BadRequest, NotFound, Unavailable
from lockstep.tokens.operation import Operation

B = TypeVar("B", bound=msgspec.Struct)
BODY_LIMIT = 8 << 20
Handler = Callable[[Request], Awaitable[Response]]


class FleetRoutes:
    """Routes under /v1/rl. Mutations are operations: same Idempotency-Key, same answer."""

    def __init__(self, gateway: GatewayContext, fleet: Fleet) -> None:
        self._gateway = gateway
        self._fleet = fleet
        self._decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}
        at = "/v1/rl"
        self.routes = [
            Route(f"{at}/state", self.state),
            Route(f"{at}/health", self.health),
            Route(f"{at}/ready", self.ready),
            Route(f"{at}/weight_version", self.weight_version),
            Route(f"{at}/workers", self.workers, methods=["GET"]),
            Route(f"{at}/workers", self.add_worker, methods=["POST"]),
            Route(f"{at}/workers/{{worker:path}}", self.remove_worker, methods=["DELETE"]),
            Route(f"{at}/operations/{{operation}}", self.operation),
            Route(f"{at}/pause", self.pause, methods=["POST"]),
            Route(f"{at}/resume", self.resume, methods=["POST"]),
            Route(f"{at}/flush_cache", self.flush, methods=["POST"]),
            Route(f"{at}/update_weights", self.update_weights, methods=["POST"]),
            Route(f"{at}/init_broadcaster", self.init_broadcaster, methods=["POST"]),
            # prime-rl's admin client takes /v1/rl as its base and adds /v1/... to it.
            *self._both("load_lora_adapter", self.load_adapter),
            *self._both("unload_lora_adapter", self.unload_adapter),
            Route(f"{at}/v1/models", self.models),
        ]

    @staticmethod
    def _both(name: str, handler: Handler) -> list[Route]:
        paths = (f"/v1/rl/{name}", f"/v1/rl/v1/{name}")
        return [Route(path, handler, methods=["POST"]) for path in paths]

    # Views

    async def state(self, _: Request) -> Response:
        return json_response(fleet_state(self._fleet))

    async def health(self, _: Request) -> Response:
        """200 while the control plane answers; whether the fleet serves is `ready`."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        state = fleet_state(self._fleet)
        if not state["ready"]:
            raise Unavailable(f"{state['serving']} of {len(state['workers'])} workers serve")
        return json_response({"ready": True, "version": state["version"]})

    async def weight_version(self, _: Request) -> Response:
        return json_response({"weight_version": self._fleet.desired.version})

    async def workers(self, _: Request) -> Response:
        return json_response({"workers": worker_views(self._fleet)})

    async def models(self, _: Request) -> Response:
        cards = await self._gateway.book.cards(fresh=True)
        data = [{"id": c.id, "object": "model", "parent": c.parent} for c in cards]
        return json_response({"object": "list", "data": data})

    async def operation(self, http: Request) -> Response:
        name = http.path_params["operation"]
        found = await self._fleet.operations.get(name)
        if found is None:
            raise NotFound(f"there is no operation {name!r}", param="operation")
        return json_response(found)

    # Operations

    async def pause(self, http: Request) -> Response:
        """Mode, lease and cache come in the query, as in vLLM and prime-rl, or in the body."""
        body = await self._body(http, wire.PauseFleet)
        query = dict(http.query_params)
        mode = query.pop("mode", None) or body.mode or "keep"
        clear = query.pop("clear_cache", None)
        lease = query.pop("lease_seconds", None)
        if query:
            name = next(iter(query))
            raise BadRequest(f"unknown parameter {name!r}: expected mode, clear_cache, "
                             "lease_seconds", param=name)  # fmt: skip
        if mode not in ("keep", "wait", "abort"):
            raise BadRequest(f"mode is {mode!r}: expected keep, wait or abort", param="mode")
        seconds = body.lease_seconds if lease is None else _number(lease, "lease_seconds")
        done = await self._fleet.pause(mode, lease_seconds=seconds, key=_key(http))  # type: ignore[arg-type]
        if (clear or "").lower() == "true" or body.clear_cache:
            await self._fleet.flush()
        return _answer(done, status="paused", mode=mode)

    async def resume(self, http: Request) -> Response:
        await self._body(http, wire.EmptyFleetBody)
        return _answer(await self._fleet.resume(key=_key(http)), status="resumed")

    async def flush(self, http: Request) -> Response:
        await self._body(http, wire.EmptyFleetBody)
        return _answer(await self._fleet.flush(key=_key(http)))

    async def update_weights(self, http: Request) -> Response:
        body = await self._body(http, wire.UpdateWeights)
        source = None
        if body.weight_dir is None:
            specs = [TensorSpec(t.name, t.dtype, tuple(t.shape)) for t in body.tensors or ()]
            if not specs or (body.shared_memory is None) == (body.group is None):
                raise BadRequest(
                    "give a weight_dir; or tensors with either shared_memory or group",
                    param="weight_dir",
                )
            source = Source(shared=body.shared_memory, group=body.group, tensors=specs)
        done = await self._fleet.update_weights(
            body.weight_dir, version=body.version, source=source, mode=body.mode, key=_key(http)
        )
        self._gateway.book.forget()
        return _answer(done)

    async def load_adapter(self, http: Request) -> Response:
        body = await self._body(http, wire.LoadAdapter)
        done = await self._fleet.load_adapter(
            body.lora_name, body.lora_path, version=body.version, key=_key(http)
        )
        self._gateway.book.forget()
        return _answer(done, lora_name=body.lora_name)

    async def unload_adapter(self, http: Request) -> Response:
        body = await self._body(http, wire.UnloadAdapter)
        done = await self._fleet.unload_adapter(body.lora_name, key=_key(http))
        self._gateway.book.forget()
        return _answer(done, lora_name=body.lora_name)

    async def init_broadcaster(self, http: Request) -> Response:
        body = await self._body(http, wire.InitBroadcaster)
        done = await self._fleet.init_broadcaster(
            body.host,
            body.port,
            group=body.group,
            backend=body.backend,
            seconds=body.timeout,
            key=_key(http),
        )
        return _answer(done, group=body.group)

    # Workers

    async def add_worker(self, http: Request) -> Response:
        body = await self._body(http, wire.AddWorker)
        admin = await open_admin(
            body.admin_url or body.url, token=body.admin_token, backend=body.backend
        )
        try:
            member = await self._fleet.add(body.url, admin, worker_id=body.id)
        except BaseException:
            await admin.close()
            raise
        return json_response({"status": "ok", "id": member.id, "state": member.state}, 201)

    async def remove_worker(self, http: Request) -> Response:
        """Drains a worker and forgets it."""
        name = http.path_params["worker"]
        seconds = _number(http.query_params.get("drain_seconds", "30"), "drain_seconds")
        await self._fleet.remove(name, drain_seconds=seconds)
        return json_response({"status": "ok", "id": name})

    async def _body(self, http: Request, kind: type[B]) -> B:
        decoder = self._decoders.setdefault(kind, msgspec.json.Decoder(kind))
        # Some clients name a type for a body that is not there.
        empty = http.headers.get("content-length") == "0"
        raw = b"" if empty else await read_json(http, BODY_LIMIT)
        found: B = decode(decoder, raw or b"{}")
        return found


def _answer(operation: Operation, **more: object) -> Response:
    built = msgspec.to_builtins(operation)
    return json_response({"status": "ok", **more, "version": operation.version, "operation": built})


def _key(http: Request) -> str | None:
    return http.headers.get("idempotency-key")


def _number(text: str, name: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(f"{name} is {text!r}: expected seconds", param=name)
    return seconds
