"""Detection of what kind of server is at a URL, without changing anything there."""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.backends.admin import AdminName
from lockstep.backends.admin_client import AdminClient, CallBudget
from lockstep.backends.registry import ADMINS, ENGINES, TRANSPORTS
from lockstep.backends.transport import TransportName
from lockstep.http.client.client import HttpClient
from lockstep.protocol.common.model_card import decode_models
from lockstep.tokens.errors import (
    BadRequest,
    EngineFailure,
    Forbidden,
    LockstepError,
    NotFound,
    Unauthorized,
    Unavailable,
    UnsupportedField,
)

OWNERS: dict[str, TransportName] = {
    engine.owned_by: engine.transport for engine in ENGINES.values() if engine.owned_by
}
"""The transport of a server, by the `owned_by` of its model cards."""
LIVENESS = "/engine/liveness_probe"


async def detect_transport(http: HttpClient) -> TransportName:
    """Return what a data port speaks: by the owner of its models, its API document, or its workers.
    Raises Unavailable that lists what was tried, or says that no server responds there."""
    tried: list[str] = []
    responds = False
    for path, recognise in (
        ("/v1/models", _by_owner),
        ("/openapi.json", _by_description),
        ("/v1/rl/workers", _by_workers),
    ):
        try:
            name = recognise(await http.get(path))
        except LockstepError as error:
            responds |= not isinstance(error, Unavailable)
            tried.append(f"{path}: {error.message}")
            continue
        if name is not None:
            return name
        responds = True
        tried.append(f"{path}: no known server")
    if not responds:
        raise Unavailable(
            f"no server responds at {http.base_url}: start one (`lockstep serve MODEL`), or "
            f"correct the URL; {tried[0]}"
        )
    raise Unavailable(
        f"cannot tell what {http.base_url} speaks, name it with transport=... "
        f"({', '.join(TRANSPORTS)}); {'; '.join(tried)}"
    )


async def detect_admin(client: AdminClient, budget: CallBudget) -> AdminName:
    """Return how the worker at this URL is controlled.

    Raises Unauthorized for a wrong token, UnsupportedField for a server without control routes, and
    Unavailable, listing what was tried, when it cannot be reached or recognised.
    """
    tried: list[str] = []
    try:
        response = await client.post(LIVENESS, {}, budget, idempotent=True)
        fields = client.decode_object(response, LIVENESS)
        return "lockstep" if "weights_id" in fields else "dynamo"
    except (Unauthorized, Forbidden, Unavailable):
        raise
    except LockstepError as error:
        # The words in which Dynamo's system server reports a missing route.
        if "Route /engine/" in error.message:
            return "dynamo"
        tried.append(error.message)
    owner = await _owner(client, budget, tried)
    if owner == "lockstep":
        raise UnsupportedField(
            f"{client.url} is the data port of a Lockstep worker: give its system_url",
            param="url",
        )
    for name, engine in ENGINES.items():
        route = engine.control_route
        if route is not None and await _has(client, route, budget, tried):
            return name
    if owner == "vllm":
        raise UnsupportedField(
            f"{client.url} is a vLLM server without control routes: start it with "
            "VLLM_SERVER_DEV_MODE=1, on a port that only the fleet can reach",
            param="url",
        )
    raise Unavailable(
        f"cannot tell what {client.url} is, name it with backend=... "
        f"({', '.join(ADMINS)}); {'; '.join(tried)}"
    )


def _by_owner(body: bytes | bytearray) -> TransportName | None:
    names = {OWNERS.get(card.owned_by or "") for card in decode_models(body)} - {None}
    return names.pop() if len(names) == 1 else None


class _Description(msgspec.Struct):
    info: dict[str, Any] = {}
    paths: dict[str, Any] = {}


def _by_description(body: bytes | bytearray) -> TransportName | None:
    try:
        description = msgspec.json.decode(body, type=_Description)
    except msgspec.DecodeError:
        return None
    title = str(description.info.get("title", "")).lower()
    # Titles first: a Dynamo frontend may have vLLM's generate route as well.
    for engine in ENGINES.values():
        if engine.api_title is not None and engine.api_title in title:
            return engine.transport
    for engine in ENGINES.values():
        if engine.api_paths and engine.api_paths <= description.paths.keys():
            return engine.transport
    return None


def _by_workers(body: bytes | bytearray) -> TransportName | None:
    try:
        listing = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    return "dynamo" if isinstance(listing, dict) and "protocol_version" in listing else None


async def _owner(client: AdminClient, budget: CallBudget, tried: list[str]) -> str | None:
    try:
        cards = decode_models(await client.get("/v1/models", budget))
    except LockstepError as error:
        tried.append(error.message)
        return None
    return next((card.owned_by for card in cards if card.owned_by), None)


async def _has(client: AdminClient, path: str, budget: CallBudget, tried: list[str]) -> bool:
    try:
        client.decode_object(await client.get(path, budget), path)
    except (NotFound, EngineFailure, BadRequest) as error:
        tried.append(error.message)
        return False
    except Unavailable:
        return True  # the route exists, and reports that the engine behind it does not respond
    return True
