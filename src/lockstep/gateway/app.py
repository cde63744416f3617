"""The two applications of a gateway: the data plane, and the control plane on its own port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

from lockstep.fleet.fleet import Fleet
from lockstep.gateway.auth import AdminAuth, DataAuth, TenantKeys
from lockstep.gateway.chat.route import ChatRoutes
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.fast_routes import SESSION_TEMPLATE, FastRoutes
from lockstep.gateway.messages.route import MessagesRoutes
from lockstep.gateway.metrics import GatewayMetrics
from lockstep.gateway.model_registry import AdapterFinder, ModelRegistry
from lockstep.gateway.openapi.control_docs import CONTROL_ROUTE_DOCS
from lockstep.gateway.openapi.document import TOKEN, OpenApiRoutes
from lockstep.gateway.options import GatewayOptions
from lockstep.gateway.responses.route import ResponsesRoutes
from lockstep.gateway.routes.caller_session import CallerSessionRoutes
from lockstep.gateway.routes.completions import CompletionsRoutes
from lockstep.gateway.routes.control import ControlRoutes
from lockstep.gateway.routes.control_sessions import ControlSessionRoutes
from lockstep.gateway.routes.engine_metrics import EngineMetricsRoutes
from lockstep.gateway.routes.generate import GenerateRoutes
from lockstep.gateway.routes.server_info import ServerInfoRoutes
from lockstep.gateway.routes.status import StatusRoutes
from lockstep.gateway.routes.tokenize import TokenizeRoutes
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.gateway.single_port import SinglePort
from lockstep.http.auth import RequestAuth
from lockstep.http.exposure import hosts_of
from lockstep.http.handlers import EXCEPTION_HANDLERS
from lockstep.http.route_templates import RouteTemplates
from lockstep.http.server.loop_monitor import LoopMonitor
from lockstep.http.server.server import Endpoint, listen, serving, url_of
from lockstep.http.tls import without_ca
from lockstep.tokens.errors import CustomCode, LockstepError, NotFound

ANY_METHOD = ["GET", "POST", "PUT", "DELETE"]
DashboardFactory = Callable[[GatewayContext, GatewayMetrics], ASGIApp]


@dataclass(frozen=True, slots=True)
class Attachment:
    """The parts that a trainer adds to a gateway: data-plane routes, and names of adapters.

    Adapters whose names start with `private` are those of single tenants: `find_adapter` alone
    returns them. Paths below `secret_paths` need no key: their URLs are secrets.
    """

    routes: Sequence[BaseRoute]
    find_adapter: AdapterFinder
    private: str | None = None
    secret_paths: str | None = None


def data_app(
    context: GatewayContext,
    options: GatewayOptions,
    metrics: GatewayMetrics,
    attachment: Attachment | None = None,
) -> FastRoutes:
    """Build the data plane: all routes at the root, and below each session those that may join it.

    The routes of `attachment` need the same keys.
    """
    hosts = hosts_of(options.host)
    no_trainer = Route("/api/v1/{path:path}", _no_trainer, methods=ANY_METHOD)
    generate, abort = GenerateRoutes(context).routes
    messages = MessagesRoutes(context)
    session_routes: list[BaseRoute] = [
        generate,
        *CompletionsRoutes(context).routes,
        *ChatRoutes(context).routes,
        *messages.routes,
        messages.other,
        *ResponsesRoutes(context).routes,
        *TokenizeRoutes(context).routes,
        *StatusRoutes(context).routes,
        *CallerSessionRoutes(context).routes,
    ]
    all_routes: list[BaseRoute] = [
        abort,
        *session_routes,
        *ServerInfoRoutes(context).routes,
        *metrics.routes,
        *OpenApiRoutes().routes,
        *([no_trainer] if attachment is None else attachment.routes),
        Route("/v1/rl/{path:path}", _other_port, methods=ANY_METHOD),
        Route("/dashboard", _other_port),
        Mount(SESSION_TEMPLATE, routes=session_routes),
    ]
    auth = partial(
        DataAuth,
        keys=TenantKeys(
            context.sessions,
            options.api_keys,
            key_file=options.key_file,
            store=options.key_store,
            shared=options.shared_sessions,
        ),
        hosts=hosts,
        session_routes=RouteTemplates(
            [*session_routes, Mount(SESSION_TEMPLATE, routes=session_routes)]
        ),
        secret_paths=None if attachment is None else attachment.secret_paths,
    )
    routed = Starlette(
        routes=all_routes,
        middleware=[
            Middleware(metrics.middleware, templates=RouteTemplates(all_routes)),
            Middleware(auth),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    # The fast path authenticates with middleware of its own, around the same application.
    return FastRoutes(
        routed,
        auth(routed),
        metrics,
        at_root=[abort],
        in_sessions=session_routes,
    )


async def _no_trainer(_: Request) -> Response:
    """Raise NotFound for a path of the Tinker API on a gateway without a trainer."""
    raise NotFound(
        "this gateway has no trainer, which the Tinker API needs: start one with "
        "`lockstep tinker MODEL`, which serves everything that this one does",
        param="path",
    )


async def _other_port(http: Request) -> Response:
    """Raise NotFound for a control-plane path on the data port."""
    raise NotFound(
        f"{http.url.path} is a route of the admin port, and this is the data port: the gateway "
        "prints the admin address when it starts, and `lockstep state` finds it on this machine",
        param="path",
    )


def control_app(
    context: GatewayContext,
    fleet: Fleet,
    token: str,
    *,
    hosts: Iterable[str] | None = None,
    metrics: GatewayMetrics | None = None,
    dashboard: ASGIApp | None = None,
    worker_token: str | None = None,
) -> Starlette:
    """Build the control plane: the routes of the admin port, which all need the admin token.

    `metrics` are served here too: gateways that share a data port differ by their admin ports.
    `dashboard` serves /dashboard, and authenticates its users by a cookie of its own. With
    `worker_token`, workers can read whether they serve.
    """
    return Starlette(
        routes=[
            *ControlRoutes(context, fleet, token).routes,
            *ControlSessionRoutes(context).routes,
            *EngineMetricsRoutes(context).routes,
            *(() if metrics is None else metrics.routes),
            *OpenApiRoutes(CONTROL_ROUTE_DOCS, "Lockstep control plane", TOKEN).routes,
        ],
        middleware=[
            Middleware(RequestAuth, hosts=hosts),
            Middleware(AdminAuth, token=token, dashboard=dashboard, worker_token=worker_token),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )


async def serve_gateway(
    *,
    fleet: Fleet,
    options: GatewayOptions,
    on_ready: Callable[[str, str], None],
    stop: asyncio.Event,
    dashboard: DashboardFactory | None = None,
    attachment: Attachment | None = None,
) -> None:
    """Serve until `stop` is set, then drain. `on_ready` gets the data URL and the admin URL.

    `dashboard` builds the application at /dashboard of the admin port; `attachment` comes from a
    trainer.
    """
    options.check()
    async with AsyncExitStack() as stack:
        # Both ports are taken before the store is opened: a port in use must fail at once.
        sockets = stack.enter_context(ExitStack())
        data_socket = sockets.enter_context(
            listen(options.host, options.port, share=options.share_port)
        )
        admin_socket = sockets.enter_context(listen(options.admin_host, options.admin_port))
        sessions = await stack.enter_async_context(
            Sessions(
                options.sessions,
                ttl_seconds=options.session_seconds,
                expire_unread=options.expire_unread,
                limits=options.session_limits,
            )
        )
        find_adapter = None if attachment is None else attachment.find_adapter
        private = None if attachment is None else attachment.private
        models = ModelRegistry(
            fleet.pool.models,
            options.tokenizer,
            find_adapter,
            private,
            fleet.pool.response_check,
            options.control_tokens_in_text,
        )
        context = GatewayContext(
            pool=fleet.pool, models=models, sessions=sessions, limits=options.limits
        )
        metrics = GatewayMetrics(context)
        admin_hosts = hosts_of(options.admin_host)
        admin_app = control_app(
            context,
            fleet,
            options.admin_token,
            hosts=admin_hosts,
            metrics=metrics,
            dashboard=None if dashboard is None else dashboard(context, metrics),
            worker_token=options.worker_admin_token,
        )
        tls = options.tls
        data: ASGIApp = data_app(context, options, metrics, attachment)
        if options.single_port:
            hosts = hosts_of(options.host)
            control = control_app(context, fleet, options.admin_token, hosts=hosts)
            data = SinglePort(data, control, options.admin_token)
        endpoints = [
            Endpoint(data, data_socket, without_ca(tls)),
            Endpoint(admin_app, admin_socket, tls),
        ]
        # Token routes need no tokenizer: without one the gateway starts, and chat requests fail
        # with the cause. A tokenizer that can never be loaded is an error of the command instead.
        try:
            await models.renderer()
        except CustomCode:
            raise
        except LockstepError:
            pass
        async with (
            LoopMonitor(metrics.registry),
            serving(
                endpoints,
                drain_seconds=options.drain_seconds,
                limits=options.http,
                origins=options.origins,
            ),
        ):
            on_ready(url_of(data_socket, tls), url_of(admin_socket, tls))
            await stop.wait()
