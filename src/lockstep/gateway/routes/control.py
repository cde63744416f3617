"""The control plane's routes under /v1/rl: state, pauses, weight updates, adapters, workers."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.backends.admin import Source
from lockstep.backends.registry import open_admin
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.state_view import fleet_state, worker_views
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.routes.forward_to_leader import ForwardToLeader
from lockstep.http.handlers import json_response
from lockstep.http.http_request import read_json, unless_gone
from lockstep.protocol.control import fleet as wire
from lockstep.protocol.json.strict import decode
from lockstep.tokens.errors import BadRequest, CheckpointError, NotFound, Unavailable
from lockstep.tokens.operation import Operation

B = TypeVar("B", bound=msgspec.Struct)
BODY_LIMIT = 8 << 20
Handler = Callable[[Request], Awaitable[Response]]


class ControlRoutes:
    """Routes under /v1/rl.

    A mutation is an operation: sent again with the same Idempotency-Key, it returns the same
    operation and changes nothing. A gateway that is not the leader forwards mutations to it.
    """

    def __init__(self, context: GatewayContext, fleet: Fleet, token: str = "") -> None:
        """`token` is the admin token, which all gateways of a fleet share."""
        self._context = context
        self._fleet = fleet
        self._decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}
        base = "/v1/rl"
        at_leader = ForwardToLeader(fleet, token, context)
        self.routes = [
            Route(f"{base}/state", self.state),
            Route(f"{base}/health", self.health),
            Route(f"{base}/ready", self.ready),
            Route(f"{base}/weight_version", self.weight_version),
            Route(f"{base}/workers", self.workers, methods=["GET"]),
            Route(f"{base}/workers", at_leader(self.add_worker), methods=["POST"]),
            Route(f"{base}/workers/{{worker:path}}/ready", self.worker_ready, methods=["GET"]),
            Route(
                f"{base}/workers/{{worker:path}}", at_leader(self.remove_worker), methods=["DELETE"]
            ),
            Route(f"{base}/operations/{{operation}}", self.operation),
            Route(f"{base}/pause", at_leader(self.pause), methods=["POST"]),
            Route(f"{base}/resume", at_leader(self.resume), methods=["POST"]),
            Route(f"{base}/flush_cache", at_leader(self.flush), methods=["POST"]),
            Route(f"{base}/update_weights", at_leader(self.update_weights), methods=["POST"]),
            Route(f"{base}/init_broadcaster", at_leader(self.init_broadcaster), methods=["POST"]),
            # prime-rl's admin client takes /v1/rl as its base URL and appends /v1/... to it.
            *self._both_paths("load_lora_adapter", at_leader(self.load_adapter)),
            *self._both_paths("unload_lora_adapter", at_leader(self.unload_adapter)),
            Route(f"{base}/v1/models", self.models),
        ]

    @staticmethod
    def _both_paths(name: str, handler: Handler) -> list[Route]:
        paths = (f"/v1/rl/{name}", f"/v1/rl/v1/{name}")
        return [Route(path, handler, methods=["POST"]) for path in paths]

    # Views

    async def state(self, _: Request) -> Response:
        return json_response(await fleet_state(self._fleet))

    async def health(self, _: Request) -> Response:
        """Return 200 while the control plane runs; `ready` says whether the fleet serves."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        state = await fleet_state(self._fleet)
        if not state["ready"]:
            raise Unavailable(
                f"{state['serving']} of {len(state['workers'])} workers serve; /v1/rl/state says "
                "why the others do not"
            )
        return json_response({"ready": True, "version": state["version"]})

    async def weight_version(self, _: Request) -> Response:
        return json_response({"weight_version": self._fleet.desired.version})

    async def workers(self, _: Request) -> Response:
        return json_response({"workers": worker_views(self._fleet)})

    async def models(self, _: Request) -> Response:
        cards = await self._context.models.cards(fresh=True, private=True)
        adapters = self._fleet.desired.adapters
        data = [
            {
                "id": card.id,
                "object": "model",
                "parent": card.parent,
                # prime-rl's pools read from the path which step of an adapter is loaded.
                "root": adapters[card.id].path if card.id in adapters else card.id,
            }
            for card in cards
        ]
        return json_response({"object": "list", "data": data})

    async def operation(self, http: Request) -> Response:
        name = http.path_params["operation"]
        operation = await self._fleet.operations.get(name)
        if operation is None:
            raise NotFound(
                f"there is no operation {name!r}; /v1/rl/state lists the last ones",
                param="operation",
            )
        return json_response(operation)

    # Operations

    async def pause(self, http: Request) -> Response:
        """Pause the fleet. Options are in the query, as in vLLM and prime-rl, or in the body."""
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
        operation = await self._fleet.pause(mode, lease_seconds=seconds, key=_key(http))  # type: ignore[arg-type]
        if (clear or "").lower() == "true" or body.clear_cache:
            await self._fleet.flush()
        return _response(operation, status="paused", mode=mode)

    async def resume(self, http: Request) -> Response:
        await self._body(http, wire.EmptyFleetBody)
        return _response(await self._fleet.resume(key=_key(http)), status="resumed")

    async def flush(self, http: Request) -> Response:
        await self._body(http, wire.EmptyFleetBody)
        return _response(await self._fleet.flush(key=_key(http)))

    async def update_weights(self, http: Request) -> Response:
        body = await self._body(http, wire.UpdateWeights)
        source = None
        if body.weight_dir is None:
            if not body.tensors or (body.shared_memory is None) == (body.group is None):
                raise BadRequest(
                    "weight_dir is missing: give it, or tensors with either shared_memory or group",
                    param="weight_dir",
                )
            source = Source(shared=body.shared_memory, group=body.group, tensors=body.tensors)
        operation = await self._fleet.update_weights(
            body.weight_dir, version=body.version, source=source, mode=body.mode, key=_key(http)
        )
        self._context.models.forget()
        return _response(operation)

    async def load_adapter(self, http: Request) -> Response:
        body = await self._body(http, wire.LoadAdapter)
        try:
            operation = await self._fleet.load_adapter(
                body.lora_name, body.lora_path, version=body.version, key=_key(http)
            )
        except CheckpointError as error:
            if not await asyncio.to_thread(os.path.lexists, body.lora_path):
                # Trainers load an adapter right after writing it. On another host it may not be
                # visible yet, and they retry after a 404. `lexists` may hang on a network file
                # system, so it is not for the threads of `off_loop`.
                raise NotFound(error.message, param="lora_path") from None
            raise
        self._context.models.forget()
        return _response(operation, lora_name=body.lora_name)

    async def unload_adapter(self, http: Request) -> Response:
        body = await self._body(http, wire.UnloadAdapter)
        operation = await self._fleet.unload_adapter(body.lora_name, key=_key(http))
        self._context.models.forget()
        return _response(operation, lora_name=body.lora_name)

    async def init_broadcaster(self, http: Request) -> Response:
        body = await self._body(http, wire.InitBroadcaster)
        _check_broadcaster(body)
        # Workers wait for a trainer that may never come, so the wait ends with the request.
        operation = await unless_gone(
            http,
            self._fleet.init_broadcaster(
                body.host,
                body.port,
                group=body.group,
                backend=body.backend,
                seconds=body.timeout,
                key=_key(http),
            ),
        )
        return _response(operation, group=body.group)

    # Workers

    async def add_worker(self, http: Request) -> Response:
        body = await self._body(http, wire.AddWorker)
        if not body.url.strip():
            raise BadRequest(f"url is {body.url!r}: expected the URL of a worker", param="url")
        admin = await open_admin(
            body.admin_url or body.url, token=body.admin_token, backend=body.backend
        )
        try:
            worker = await self._fleet.add(
                body.url, admin, worker_id=body.id, logprob_mode=body.logprob_mode, gpus=body.gpus
            )
        except BaseException:
            # Also when cancelled: the fleet has not taken the connection over.
            await admin.close()
            raise
        if body.admin_token is not None:
            self._fleet.membership.keep_token(worker.id, body.admin_token)
        return json_response({"status": "ok", "id": worker.id, "state": worker.state}, 201)

    async def worker_ready(self, http: Request) -> Response:
        """Return 200 while the worker is proved and gets traffic, as a pod's readiness probe."""
        worker = self._fleet.worker(http.path_params["worker"])
        if worker.state != "serving":
            why = f": {worker.reason}" if worker.reason else ""
            raise Unavailable(f"worker {worker.id!r} is {worker.state}{why}")
        return json_response({"ready": True, "version": worker.version})

    async def remove_worker(self, http: Request) -> Response:
        """Remove a worker after its requests have ended, or after `drain_seconds`."""
        name = http.path_params["worker"]
        seconds = _number(http.query_params.get("drain_seconds", "30"), "drain_seconds")
        await self._fleet.remove(name, drain_seconds=seconds)
        return json_response({"status": "ok", "id": name})

    async def _body(self, http: Request, kind: type[B]) -> B:
        decoder = self._decoders.setdefault(kind, msgspec.json.Decoder(kind))
        # Some clients send a content type but no body.
        empty = http.headers.get("content-length") == "0"
        raw = b"" if empty else await read_json(http, BODY_LIMIT)
        body: B = decode(decoder, raw or b"{}")
        return body


def _response(operation: Operation, **more: object) -> Response:
    fields = msgspec.to_builtins(operation)
    return json_response(
        {"status": "ok", **more, "version": operation.version, "operation": fields}
    )


def _key(http: Request) -> str | None:
    return http.headers.get("idempotency-key")


def _check_broadcaster(body: wire.InitBroadcaster) -> None:
    """Raise BadRequest for an address that no trainer can have, or workers would wait for it."""
    if not body.host:
        raise BadRequest("host is empty: expected where the trainer listens", param="host")
    if not 0 < body.port < 65536:
        raise BadRequest(f"port is {body.port}: expected 1 to 65535", param="port")
    if not 0 < body.timeout < math.inf:
        raise BadRequest(f"timeout is {body.timeout}: expected seconds > 0", param="timeout")


def _number(text: str, name: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(f"{name} is {text!r}: expected seconds, 0 or more", param=name)
    return seconds
