"""The worker's control methods as Dynamo's /engine routes; adapters become models of the frontend.

Dynamo's system server has no password, runs a route on GET too, and turns an exception into a bare
500. It therefore listens on loopback by default, and errors are returned instead of raised:
{"status": "error", "message": ..., "reason": ..., "code": ...} with Lockstep's stable code.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from lockstep.protocol.common.error_body import error_fields
from lockstep.protocol.json.strict import decode
from lockstep.tokens.errors import EngineFailure, LockstepError
from lockstep.worker.system import SystemPlane

log = logging.getLogger(__name__)
Fields = dict[str, Any]
Route = Callable[[Any], Awaitable[Fields]]
LOAD, UNLOAD = "load_lora_adapter", "unload_lora_adapter"


class Models(Protocol):
    """Registry of the models that Dynamo's frontends route to this worker."""

    async def add(self, name: str) -> None: ...

    async def remove(self, name: str) -> None: ...


def engine_routes(system: SystemPlane, models: Models) -> dict[str, Route]:
    """Return a callback for every method of the system port."""
    routes = {name: _route(system, name) for name in system.methods}
    routes[LOAD] = _as_response(LOAD, _load(system, models))
    routes[UNLOAD] = _as_response(UNLOAD, _unload(system, models))
    return routes


def _route(system: SystemPlane, name: str) -> Route:
    return _as_response(name, lambda body: _call(system, name, body))


async def _call(system: SystemPlane, name: str, body: Any) -> Fields:
    decoder, run = system.methods[name]
    return await run(decode(decoder, msgspec.json.encode(body)))


def _load(system: SystemPlane, models: Models) -> Route:
    async def load(body: Any) -> Fields:
        response = await _call(system, LOAD, body)
        if not response["hot_swap"]:
            try:
                await models.add(response["lora_name"])
            except EngineFailure:
                # Unload it again: an adapter that is not registered could not be unloaded later.
                await system.engine.unload_adapter(response["lora_name"])
                raise
        return response

    return load


def _unload(system: SystemPlane, models: Models) -> Route:
    async def unload(body: Any) -> Fields:
        response = await _call(system, UNLOAD, body)
        await models.remove(response["lora_name"])
        return response

    return unload


def _as_response(name: str, run: Route) -> Route:
    async def route(body: Any) -> Fields:
        try:
            return {"status": "ok", **await run({} if body is None else body)}
        except LockstepError as error:
            return _error_response(error)
        except Exception as error:
            log.exception("/engine/%s failed", name)
            return _error_response(EngineFailure(f"{name} failed: {error!r}"))

    return route


def _error_response(error: LockstepError) -> Fields:
    """Return the fields of an error, flat: Dynamo's clients read `message` at the top level."""
    fields = error_fields(error)["error"]
    return {"status": "error", **(fields if isinstance(fields, dict) else {})}
