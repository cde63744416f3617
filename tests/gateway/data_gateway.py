"""A gateway with all its data routes, in this process, in front of one worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.app import data_app
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.metrics import GatewayMetrics
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.options import GatewayOptions
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.server.server import listen, serving, url_of


@asynccontextmanager
async def data_gateway(worker_url: str, **options: Any) -> AsyncIterator[tuple[str, Sessions]]:
    """Its URL and its sessions; `options` are those of `GatewayOptions`."""
    async with Pool() as pool, Sessions(options.get("sessions")) as sessions:
        await pool.add(worker_url)
        context = GatewayContext(
            pool=pool,
            models=ModelRegistry(pool.models, "tiny", response_check=pool.response_check),
            sessions=sessions,
        )
        app = data_app(context, GatewayOptions(**options), GatewayMetrics(context))
        with listen("127.0.0.1", 0) as sock:
            async with serving([(app, sock)]):
                yield url_of(sock), sessions
