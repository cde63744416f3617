"""`lockstep worker MODEL`: one process with the embedded engine, behind HTTP or Dynamo."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli.derived_flags import ModelArgument, with_flags
from lockstep.cli.dynamo_network import DynamoNetwork
from lockstep.http.exposure import check_origins
from lockstep.http.server.limits import LIMITS, parse_limits
from lockstep.http.tls import ListenerTls
from lockstep.protocol.json.strict import LIMITS as REQUEST_LIMITS
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.numerics import PORTABLE_ENVIRONMENT
from lockstep.tracing import traced
from lockstep.worker.options import WorkerOptions

_listen_option = partial(typer.Option, rich_help_panel="Listening")


@with_flags
def worker(
    model: ModelArgument = "tiny",
    script: Annotated[
        Path | None,
        typer.Option(
            help="File of rules (JSON lines) that determine the replies instead of the model: for "
            "tests of agents, with 131,072 tokens of context."
        ),
    ] = None,
    runtime: Annotated[
        Literal["http", "dynamo"],
        _listen_option(
            help="http: an HTTP server; dynamo: registered with an NVIDIA Dynamo frontend."
        ),
    ] = "http",
    trace: Annotated[
        bool,
        _listen_option("--trace", help="Send spans of requests to an OpenTelemetry collector."),
    ] = False,
    limit: Annotated[
        list[str] | None,
        _listen_option(help="Limit of requests and connections, as NAME=NUMBER; may be repeated."),
    ] = None,
    *,
    tls: ListenerTls,
    options: partial[WorkerOptions],
    network: DynamoNetwork,
) -> None:
    """Start one worker with the embedded engine, which takes and returns token ids.

    When ready it prints one JSON line with its URLs. Admin routes need the bearer token
    LOCKSTEP_ADMIN_TOKEN; without one, a token is generated and the JSON line names its file. The
    data port needs one of LOCKSTEP_API_KEYS, if that is set.

    Exit codes: 0 the worker was stopped, 2 the command is wrong (do not restart), 75 the engine
    failed, or a lease or server that it needs was lost (restart).
    """
    if runtime == "dynamo":
        _join_network(network)  # before torch is loaded, which takes seconds
    elif network.given:
        raise BadRequest(
            "--discovery, --request-plane, --event-plane and --advertise are for --runtime "
            "dynamo: leave them out, or add it",
            param="runtime",
        )
    settings = Settings.read()
    limits, http = parse_limits(limit or (), REQUEST_LIMITS, LIMITS)
    worker_options = options(
        model=model,
        admin_token=settings.admin_token,
        api_keys=settings.api_keys,
        tls=tls.files(),
        http=http,
        limits=limits,
    )
    worker_options = replace(worker_options, origins=check_origins(worker_options.origins))
    if worker_options.engine.arithmetic == "portable":  # torch reads it at import
        os.environ.update(PORTABLE_ENVIRONMENT)
    if script is not None and runtime == "dynamo":
        raise BadRequest(
            "--script is for --runtime http: leave out one of --script and --runtime dynamo",
            param="script",
        )
    from lockstep.worker.dynamo.worker import run_dynamo_worker
    from lockstep.worker.serve import run_worker

    start = run_dynamo_worker if runtime == "dynamo" else run_worker
    if script is not None:
        from lockstep.scripted.core import scripted_engine

        start = partial(run_worker, make_engine=scripted_engine(script))
    traced("lockstep-worker", on=trace or settings.trace)(start)(worker_options)


def _join_network(network: DynamoNetwork) -> None:
    """Set the environment variables that Dynamo reads.

    Raises BadRequest for an address that other hosts of the deployment cannot reach, and
    Unavailable when etcd or NATS does not respond: Dynamo itself would wait silently.
    """
    from lockstep.backends.dynamo.reachable import check_reachable
    from lockstep.protocol.dynamo import environment as dynamo_env

    os.environ.update(network.environ())
    chosen = dynamo_env.SYSTEM_HOST in os.environ
    dynamo_env.check_advertised(dynamo_env.complete(os.environ), chosen=chosen)
    asyncio.run(check_reachable(os.environ))
