"""Life cycle of a worker process: start, ready line, drain and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.engine import Engine, EngineOptions
from lockstep.http.exposure import check_admin_exposure, check_exposure, hosts_of
from lockstep.http.server.loop_monitor import LoopMonitor
from lockstep.http.server.server import (
    Endpoint,
    admin_token,
    listen,
    run,
    say_ready,
    serving,
    stop_event,
    url_of,
)
from lockstep.models import bundled
from lockstep.progress import Progress
from lockstep.worker.data import DataPlane
from lockstep.worker.options import WorkerOptions
from lockstep.worker.system import SystemPlane

log = logging.getLogger(__name__)


MakeEngine = Callable[[str, EngineOptions], Engine]


def run_worker(options: WorkerOptions, make_engine: MakeEngine = Engine) -> None:
    """Serve until SIGTERM or SIGINT; print one JSON line on stdout when ready.

    Raises Forbidden before starting when the data port would be open to everyone.
    """
    tls = options.tls
    keyed = bool(options.api_keys) or (tls is not None and tls.ca is not None)
    check_exposure(options.host, keyed, options.insecure)
    check_admin_exposure(options.system_host, tls is not None, options.insecure)
    run(_serve(options, make_engine))


async def _serve(options: WorkerOptions, make_engine: MakeEngine) -> None:
    name = options.served_name or Path(options.model).name
    with admin_token(options.admin_token) as (token, token_file), contextlib.ExitStack() as stack:
        # Bind both ports before loading, so that a taken port fails at once.
        data_socket = stack.enter_context(listen(options.host, options.port))
        system_socket = stack.enter_context(listen(options.system_host, options.system_port))
        worker = options.engine.worker or url_of(data_socket).partition("://")[2]
        # Under a supervisor stdout is a pipe for the ready line, and the supervisor shows progress.
        with Progress(f"Loading {name}", visible=sys.stdout.isatty()):
            engine = make_engine(options.model, replace(options.engine, worker=worker))
        data = DataPlane(
            engine,
            name,
            bundled(options.model) or Path(options.model),
            keys=options.api_keys,
            hosts=hosts_of(options.host),
            return_routed_experts=options.return_routed_experts,
            limits=options.limits,
        )
        system_hosts = hosts_of(options.system_host)
        system = SystemPlane(
            engine, token, options.checkpoint_roots, hosts=system_hosts, model=name
        )
        tls = options.tls
        endpoints = [
            Endpoint(data.app, data_socket, tls),
            Endpoint(system.app, system_socket, tls),
        ]
        async with (
            engine,
            LoopMonitor(data.metrics.registry),
            serving(
                endpoints,
                drain_seconds=options.drain_seconds,
                limits=options.http,
                origins=options.origins,
            ),
        ):
            stop = stop_event()
            say_ready(
                url=url_of(data_socket, tls),
                system_url=url_of(system_socket, tls),
                model=name,
                pid=os.getpid(),
                admin_token_file=token_file,
                version=engine.version,
                arithmetic=engine.arithmetic,
                numerics=engine.plan.to_json(),
            )
            await stop.wait()
            await drain(engine, data, options.drain_seconds)


async def drain(engine: Engine, data: DataPlane, seconds: float) -> None:
    """Reject new requests, wait for running ones, and abort those still running after `seconds`."""
    data.draining = True
    try:
        async with asyncio.timeout(seconds):
            while engine.busy:
                await asyncio.sleep(0.02)
    except TimeoutError:
        log.warning("drain timed out after %g s: aborting the remaining requests", seconds)
        await engine.pause("abort")
