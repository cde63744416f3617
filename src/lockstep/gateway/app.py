"""The gateway process: its faces on the data port, control on the admin port, start and end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from socket import socket

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp

from lockstep.fleet.fleet import Fleet
from lockstep.gateway.chat.route import ChatRoutes
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.fast_routes import SESSION_TEMPLATE, FastRoutes
from lockstep.gateway.metrics import GatewayMetrics
from lockstep.gateway.models import ModelRegistry
from lockstep.gateway.openapi.document import OpenApiRoutes
from lockstep.gateway.routes.completions import CompletionsRoutes
from lockstep.gateway.routes.control import ControlPlane
from lockstep.gateway.routes.generate import GenerateRoutes
from lockstep.gateway.routes.status import StatusRoutes
from lockstep.gateway.routes.tokenize import TokenizeRoutes
from lockstep.gateway.sessions.sessions import TTL_SECONDS, Sessions
from lockstep.http.auth import RequestAuth, check_exposure, hosts_of
from lockstep.http.handlers import EXCEPTION_HANDLERS
from lockstep.http.limits import DRAIN_SECONDS, LIMITS, ServerLimits
from lockstep.http.route_templates import RouteTemplates
from lockstep.http.server import listen, serving, url_of
from lockstep.tokens.errors import LockstepError


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """How a gateway listens and what it keeps. Ports 0 are chosen by the system."""

    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    admin_token: str = ""
    api_keys: tuple[str, ...] = ()
    sessions: str = "memory"
    session_seconds: float = TTL_SECONDS
    expire_unread: bool = False
    tokenizer: str | None = None
    insecure: bool = False
    body_limit: int = 64 << 20
    drain_seconds: float = DRAIN_SECONDS
    http: ServerLimits = LIMITS

    def check(self) -> None:
        """Raises Forbidden for a listener that anybody on the network could use."""
        check_exposure(self.host, self.api_keys, self.insecure)


def data_app(
    gateway: GatewayContext, options: GatewayOptions, metrics: GatewayMetrics
) -> FastRoutes:
    """The data plane: every face at the root, and those that sessions may use under theirs."""
    hosts = hosts_of(options.host)
    generate = GenerateRoutes(gateway).routes
    routes: list[BaseRoute] = [
        *ChatRoutes(gateway).routes,
        *CompletionsRoutes(gateway).routes,
        *TokenizeRoutes(gateway).routes,
        *StatusRoutes(gateway).routes,
    ]
    everything: list[BaseRoute] = [
        *generate,
        *routes,
        *metrics.routes,
        *OpenApiRoutes().routes,
        Mount(SESSION_TEMPLATE, routes=routes),
    ]
    routed = Starlette(
        routes=everything,
        middleware=[
            Middleware(metrics.middleware, templates=RouteTemplates(everything)),
            Middleware(RequestAuth, keys=options.api_keys, hosts=hosts),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    return FastRoutes(
        routed,
        RequestAuth(routed, keys=options.api_keys, hosts=hosts),
        metrics,
        at_root=generate,
        in_sessions=routes,
    )


async def serve_gateway(
    *,
    fleet: Fleet,
    options: GatewayOptions,
    on_ready: Callable[[str, str], None],
    stop: asyncio.Event,
) -> None:
    """Serves until `stop` is set, then drains. `on_ready` gets the data and the admin URL."""
    options.check()
    async with AsyncExitStack() as stack:
        sockets = stack.enter_context(ExitStack())
        data_socket = sockets.enter_context(listen(options.host, options.port))
        admin_socket = sockets.enter_context(listen(options.admin_host, options.admin_port))
        sessions = await stack.enter_async_context(
            Sessions(
                options.sessions,
                ttl_seconds=options.session_seconds,
                expire_unread=options.expire_unread,
            )
        )
        pool = fleet.pool
        book = ModelRegistry(pool.models, options.tokenizer)
        gateway = GatewayContext(
            pool=pool, book=book, sessions=sessions, body_limit=options.body_limit
        )
        metrics = GatewayMetrics(gateway)
        hosts = hosts_of(options.admin_host)
        control = ControlPlane(gateway, fleet, options.admin_token, hosts=hosts)
        apps: list[tuple[ASGIApp, socket]] = [
            (data_app(gateway, options, metrics), data_socket),
            (control.app, admin_socket),
        ]
        # Text needs a tokenizer, tokens do not: without one, chat requests say what is missing.
        with suppress(LockstepError):
            await book.renderer()
        async with serving(apps, drain_seconds=options.drain_seconds, limits=options.http):
            on_ready(url_of(data_socket), url_of(admin_socket))
            await stop.wait()
