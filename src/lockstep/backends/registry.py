"""Opens the transport for a server, by name or by asking the server what it is."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from lockstep.backends.dynamo.generate_transport import DynamoGenerateTransport
from lockstep.backends.dynamo.transport import DynamoTransport
from lockstep.backends.model_limits import read_models
from lockstep.backends.sglang.transport import SglangTransport
from lockstep.backends.transport import Transport, TransportName
from lockstep.backends.vllm.transport import VllmTransport
from lockstep.http.client import HttpClient
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable

NAMES: tuple[TransportName, ...] = get_args(TransportName)
OWNERS: dict[str, TransportName] = {
    "vllm": "vllm",
    "lockstep": "vllm",
    "nvidia": "dynamo",
    "sglang": "sglang",
}


async def open_transport(
    base_url: str,
    transport: TransportName | None = None,
    *,
    logprob_mode: LogprobMode | None = None,
    version: str | None = None,
    experts_layout: tuple[int, int] | None = None,
    api_key: str | None = None,
    timeout: float = 1800.0,
    retries: int = 2,
    connections: int = 1024,
) -> Transport:
    """The transport named, or the one the server at `base_url` turns out to speak.

    `logprob_mode` says how that server computes logprobs where it does not say so itself,
    `version` labels tokens of servers that tell no weight version, `timeout` is the default
    deadline of one call in seconds. Raises BadRequest for an unknown name, and Unavailable when
    the server cannot be reached or recognised.
    """
    if transport is not None and transport not in NAMES:
        raise BadRequest(
            f"transport is {transport!r}, expected one of {', '.join(NAMES)}", param="transport"
        )
    link = HttpClient(
        base_url, api_key=api_key, timeout=timeout, retries=retries, connections=connections
    )
    try:
        name = transport or await detect(link)
    except LockstepError:
        await link.close()
        raise
    options: dict[str, Any] = {"logprob_mode": logprob_mode, "version": version}
    options = {key: value for key, value in options.items() if value is not None}
    if name == "vllm":
        return VllmTransport(link, **options)
    if name == "dynamo":
        return DynamoTransport(link, **options)
    if name == "dynamo-generate":
        return DynamoGenerateTransport(link, **options)
    return SglangTransport(link, experts_layout=experts_layout, **options)


async def detect(link: HttpClient) -> TransportName:
    """What the server speaks: by the owner of its models, its API description, or its workers.

    `dynamo-generate` is never chosen here: nothing shows whether its workers opted in.
    Raises Unavailable that lists what was tried.
    """
    tried: list[str] = []
    for path, judge in (
        ("/v1/models", _by_owner),
        ("/openapi.json", _by_description),
        ("/v1/rl/workers", _by_workers),
    ):
        try:
            name = judge(await link.get(path))
        except LockstepError as error:
            tried.append(f"{path}: {error.message}")
            continue
        if name is not None:
            return name
        tried.append(f"{path}: nothing known in it")
    raise Unavailable(
        f"cannot tell what {link.base_url} speaks, name it with transport=... "
        f"({', '.join(NAMES)}); {'; '.join(tried)}"
    )


def _by_owner(body: bytes | bytearray) -> TransportName | None:
    owners = {OWNERS.get(card.owned_by or "") for card in read_models(body)} - {None}
    return owners.pop() if len(owners) == 1 else None


class _Description(msgspec.Struct):
    info: dict[str, Any] = {}
    paths: dict[str, Any] = {}


def _by_description(body: bytes | bytearray) -> TransportName | None:
    try:
        found = msgspec.json.decode(body, type=_Description)
    except msgspec.DecodeError:
        return None
    if "dynamo" in str(found.info.get("title", "")).lower():
        return "dynamo"
    if "/inference/v1/generate" in found.paths:
        return "vllm"
    return "sglang" if {"/generate", "/get_model_info"} <= found.paths.keys() else None


def _by_workers(body: bytes | bytearray) -> TransportName | None:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    return "dynamo" if isinstance(found, dict) and "protocol_version" in found else None
