"""The list of engines: one entry each, from which all other lists of engines are derived.

This module imports no driver: commands read their choices from it. `open_transport` and
`open_admin` import the driver they open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lockstep.tokens.errors import BadRequest, LockstepError

if TYPE_CHECKING:
    from lockstep.backends.admin import Admin
    from lockstep.backends.admin_client import CallBudgets
    from lockstep.backends.transport import Transport
    from lockstep.tokens import LogprobMode


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The differences between engines, apart from the code of their drivers.

    Drivers: `transports` has those of the data side by the names that users give, `admin` is that
    of the control side, each as "module:class" below `lockstep.backends`. `transport` is the one
    that its data port speaks; `transport_options` are keyword arguments that only its own take.
    `pause_routes` are the control routes that pause and resume it.

    Detection: the `owned_by` of its model cards; a word in the title of its OpenAPI document, paths
    of that document, or a GET route of its control side, that no earlier engine of the list has.

    `health_route` is a GET route of its data port that responds while it is healthy, also while it
    is paused.

    `package` is the distribution that installs it in an environment of its own, `install` how to
    get it. Lockstep itself starts an engine that `is_launched` (`lockstep serve --engine`).
    """

    title: str
    transport: str
    transports: Mapping[str, str] = field(default_factory=dict)
    transport_options: tuple[str, ...] = ()
    admin: str | None = None
    pause_routes: tuple[str, str] | None = None
    owned_by: str | None = None
    api_title: str | None = None
    api_paths: frozenset[str] = frozenset()
    control_route: str | None = None
    health_route: str = "/health"
    package: str | None = None
    install: str = ""
    is_launched: bool = False


_ENGINE_ROUTES = ("/engine/pause_generation", "/engine/resume_generation")

ENGINES: Mapping[str, EngineSpec] = MappingProxyType(
    {
        "lockstep": EngineSpec(
            title="Lockstep",
            transport="vllm",
            admin="lockstep.admin:LockstepAdmin",
            pause_routes=_ENGINE_ROUTES,
            owned_by="lockstep",
            is_launched=True,
        ),
        # Before vllm: prime-rl's server is vLLM with routes of its own, and has vLLM's as well.
        "prime-rl": EngineSpec(
            title="prime-rl",
            transport="vllm",
            admin="prime_rl.admin:PrimeAdmin",
            pause_routes=("/pause", "/resume"),
            control_route="/liveness",
        ),
        "vllm": EngineSpec(
            title="vLLM",
            transport="vllm",
            transports={"vllm": "vllm.transport:VllmTransport"},
            admin="vllm.admin:VllmAdmin",
            pause_routes=("/pause", "/resume"),
            owned_by="vllm",
            api_paths=frozenset({"/inference/v1/generate"}),
            control_route="/is_paused",
            package="vllm",
            install="scripts/install-vllm.sh, or set LOCKSTEP_VLLM_PYTHON",
            is_launched=True,
        ),
        "dynamo": EngineSpec(
            title="Dynamo",
            transport="dynamo",
            transports={
                "dynamo": "dynamo.transport:DynamoTransport",
                # Never detected: nothing shows whether the workers have opted in to its route.
                "dynamo-generate": "dynamo.generate_transport:DynamoGenerateTransport",
            },
            admin="dynamo.admin:DynamoAdmin",
            pause_routes=_ENGINE_ROUTES,
            owned_by="nvidia",
            api_title="dynamo",
            package="ai-dynamo",
            install="scripts/install-dynamo.sh",
        ),
        "sglang": EngineSpec(
            title="SGLang",
            transport="sglang",
            transports={"sglang": "sglang.transport:SglangTransport"},
            transport_options=("experts_layout",),
            admin="sglang.admin:SglangAdmin",
            pause_routes=("/pause_generation", "/continue_generation"),
            owned_by="sglang",
            api_paths=frozenset({"/generate", "/get_model_info"}),
            control_route="/model_info",
            # Its /health generates a token, which a paused server never does: it reports itself
            # unhealthy after 20 s. This route is answered by the process that schedules requests.
            health_route="/server_info",
            package="sglang",
            install="scripts/install-sglang.sh, or set LOCKSTEP_SGLANG_PYTHON",
            is_launched=True,
        ),
    }
)
TRANSPORTS: tuple[str, ...] = tuple(
    name for engine in ENGINES.values() for name in engine.transports
)
"""Names of transports (`--transport`)."""
ADMINS: tuple[str, ...] = tuple(name for name, engine in ENGINES.items() if engine.admin)
"""Engines that Lockstep can control."""
BACKENDS: tuple[str, ...] = ("auto", *ADMINS)
LAUNCHED: tuple[str, ...] = tuple(name for name, engine in ENGINES.items() if engine.is_launched)
"""Engines that Lockstep starts (`--engine`)."""
if TYPE_CHECKING:
    TransportName: TypeAlias = str
    AdminName: TypeAlias = str
    EngineName: TypeAlias = str
else:
    # Literal types of the names, so that commands offer them as choices. A type checker cannot read
    # them from a table, and sees str: names are checked when a driver is opened.
    TransportName, AdminName, EngineName = Literal[TRANSPORTS], Literal[ADMINS], Literal[LAUNCHED]


def check_name(name: str, names: Iterable[str], param: str) -> str:
    """Return `name`. Raises BadRequest, listing `names`, when it is not one of them."""
    if name not in names:
        raise BadRequest(f"{param} is {name!r}, expected one of {', '.join(names)}", param=param)
    return name


def engine_of(transport: str) -> EngineSpec:
    """Return the engine that a transport was written for."""
    return next(engine for engine in ENGINES.values() if transport in engine.transports)


def transport_class(name: str) -> Any:
    """Import and return the driver of a transport."""
    return _import(engine_of(name).transports[name])


def admin_class(name: str) -> Any:
    """Import and return the driver of an engine's control side."""
    return _import(ENGINES[name].admin or "")


def _import(driver: str) -> Any:
    module, _, class_name = driver.partition(":")
    return getattr(import_module(f"lockstep.backends.{module}"), class_name)


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
    """Open the named transport, or detect which one the server at `base_url` speaks.

    `logprob_mode` says how the server computes logprobs where its responses do not, `version`
    labels the tokens of servers that report no weight version, `experts_layout` is (layers, top_k)
    for SGLang, `timeout` is the default deadline of one call in seconds. Raises BadRequest for an
    unknown name and Unavailable when the server cannot be reached or recognised.
    """
    from lockstep.backends.detect import detect_transport
    from lockstep.http.client.client import HttpClient

    if transport is not None:
        check_name(transport, TRANSPORTS, "transport")
    http = HttpClient(
        base_url, api_key=api_key, timeout=timeout, retries=retries, connections=connections
    )
    try:
        name = transport or await detect_transport(http)
    except LockstepError:
        await http.close()
        raise
    options = {"experts_layout": experts_layout}
    own = {option: options[option] for option in engine_of(name).transport_options}
    driver: Transport = transport_class(name)(
        http, logprob_mode=logprob_mode, version=version, **own
    )
    return driver


async def open_admin(
    url: str,
    token: str | None = None,
    backend: str = "auto",
    *,
    routes: Iterable[str] | None = None,
    budgets: CallBudgets | None = None,
    backoff: float = 0.1,
) -> Admin:
    """Open the named admin driver, or detect which one the worker at `url` needs.

    `routes` are those that a Dynamo worker advertises, as discovery lists them. Raises BadRequest
    for an unknown name, Unauthorized for a wrong token, UnsupportedField for a worker whose control
    routes are switched off, and Unavailable when it cannot be reached or recognised.
    """
    from lockstep.backends.admin_client import BUDGETS, AdminClient
    from lockstep.backends.detect import detect_admin

    name, budgets = check_name(backend, BACKENDS, "backend"), budgets or BUDGETS
    if backend == "auto":
        client = AdminClient(url, token=token, backoff=backoff)
        try:
            name = await detect_admin(client, budgets.quick)
        finally:
            await client.close()
    own = {}
    if name == "dynamo":
        if routes is None:
            raise BadRequest(
                f"{url} is a Dynamo worker, and only discovery lists its routes: give routes, as "
                "GET /v1/rl/workers lists them",
                param="routes",
            )
        own = {"routes": routes}
    admin = admin_class(name)(url, token=token, budgets=budgets, backoff=backoff, **own)
    try:
        await admin.detect()
    except BaseException:
        await admin.close()
        raise
    driver: Admin = admin
    return driver
