"""Every kind of server by name: opens its transport or its admin driver.

Without a name, `detect` finds out what the server is. A new engine is a line in these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, get_args

from lockstep.backends.admin import Admin, AdminName
from lockstep.backends.admin_client import BUDGETS, AdminClient, CallBudgets
from lockstep.backends.detect import detect_admin, detect_transport
from lockstep.backends.dynamo.admin import DynamoAdmin
from lockstep.backends.dynamo.generate_transport import DynamoGenerateTransport
from lockstep.backends.dynamo.transport import DynamoTransport
from lockstep.backends.lockstep.admin import LockstepAdmin
from lockstep.backends.prime_rl.admin import PrimeAdmin
from lockstep.backends.sglang.transport import SglangTransport
from lockstep.backends.transport import Transport, TransportName
from lockstep.backends.vllm.admin import VllmAdmin
from lockstep.backends.vllm.transport import VllmTransport
from lockstep.http.client.client import HttpClient
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest, LockstepError

TRANSPORTS: Mapping[TransportName, Callable[..., Transport]] = {
    "vllm": VllmTransport,
    "dynamo": DynamoTransport,
    "dynamo-generate": DynamoGenerateTransport,
    "sglang": SglangTransport,
}
ADMINS: Mapping[AdminName, Callable[..., Admin]] = {
    "lockstep": LockstepAdmin,
    "vllm": VllmAdmin,
    "prime-rl": PrimeAdmin,
    "dynamo": DynamoAdmin,
}
BackendName = Literal["auto", AdminName]
BACKENDS: tuple[str, ...] = ("auto", *get_args(AdminName))


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
    `version` labels tokens of servers that tell no weight version, `experts_layout` is for SGLang
    (see there), `timeout` is the default deadline of one call in seconds. Raises BadRequest for an
    unknown name, and Unavailable when the server cannot be reached or recognised.
    """
    if transport is not None and transport not in TRANSPORTS:
        raise BadRequest(
            f"transport is {transport!r}, expected one of {', '.join(TRANSPORTS)}",
            param="transport",
        )
    http = HttpClient(
        base_url, api_key=api_key, timeout=timeout, retries=retries, connections=connections
    )
    try:
        name = transport or await detect_transport(http)
    except LockstepError:
        await http.close()
        raise
    own = {"experts_layout": experts_layout} if name == "sglang" else {}
    return TRANSPORTS[name](http, logprob_mode=logprob_mode, version=version, **own)


async def open_admin(
    url: str,
    token: str | None = None,
    backend: BackendName = "auto",
    *,
    routes: Iterable[str] | None = None,
    budgets: CallBudgets = BUDGETS,
    backoff: float = 0.1,
) -> Admin:
    """The driver named, or the one for what the worker at `url` turns out to be.

    `routes` are those a Dynamo worker advertises, as discovery lists them. Raises BadRequest for an
    unknown name, Unauthorized for a wrong token, UnsupportedField for a worker whose control
    routes are switched off, and Unavailable when it cannot be reached or recognised.
    """
    if backend not in BACKENDS:
        raise BadRequest(
            f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}", param="backend"
        )
    if backend == "auto":
        client = AdminClient(url, token=token, backoff=backoff)
        try:
            name = await detect_admin(client, budgets.quick)
        finally:
            await client.close()
    else:
        name = backend
    own = {}
    if name == "dynamo":
        if routes is None:
            raise BadRequest(
                f"{url} is a Dynamo worker, and which routes it has is told by discovery only: "
                "give routes, as GET /v1/rl/workers lists them",
                param="routes",
            )
        own = {"routes": routes}
    admin = ADMINS[name](url, token=token, budgets=budgets, backoff=backoff, **own)
    if isinstance(admin, VllmAdmin):
        try:
            await admin.detect_extension()
        except BaseException:
            await admin.close()
            raise
    return admin
