"""`lockstep serve` and `lockstep gateway`: one URL in front of several workers."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.backends.registry import ENGINES, LAUNCHED, EngineName, TransportName
from lockstep.cli.derived_flags import ModelArgument, with_flags
from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.dns_workers import DnsWorkers
from lockstep.cli.serving.dynamo_workers import DynamoWorkers
from lockstep.cli.serving.engine_choice import EngineChoice, worker_source
from lockstep.cli.serving.run import GatewayProcess
from lockstep.cli.serving.sources import (
    JoiningWorkers,
    RunningWorkers,
    StoredWorkers,
    WorkerSource,
)
from lockstep.models import bundled
from lockstep.settings import Settings
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest

ENGINE_HELP = "; ".join(
    f"{name}: {'the embedded engine' if name == 'lockstep' else f'{ENGINES[name].title} servers'}"
    for name in LAUNCHED
)


@with_flags
def serve(
    model: ModelArgument = "tiny",
    engine_args: Annotated[
        list[str] | None,
        typer.Argument(help="Options of the engine's own server command, after --."),
    ] = None,
    engine: Annotated[EngineName, typer.Option(help=ENGINE_HELP)] = "lockstep",
    worker: Annotated[
        list[str] | None,
        typer.Option(help="URL of a server of that engine that runs already; may be repeated."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of worker processes.")] = 1,
    logprobs_mode: Annotated[
        LogprobMode | None,
        typer.Option(
            help="processed: logprobs of the distribution that tokens are drawn from; raw: "
            "logprobs of the model's own. By default processed; with --worker, set it to the "
            "mode of those servers, by default raw."
        ),
    ] = None,
    worker_args: Annotated[
        str, typer.Option(help="Options of `lockstep worker` for every worker, in one string.")
    ] = "",
    gpus: Annotated[
        str | None,
        typer.Option(
            help="GPUs to place the workers on: all, or a list such as 0-3,6, in which a GPU that "
            "is listed twice has two workers; none: do not place them. By default all that are "
            "visible."
        ),
    ] = None,
    *,
    arguments: GatewayArguments,
) -> None:
    """Start workers and a gateway: one URL that OpenAI and vLLM clients can use."""
    settings = Settings.read()
    mode = () if logprobs_mode is None else ("--logprobs-mode", logprobs_mode)
    source = worker_source(
        model,
        EngineChoice(
            engine, workers, tuple(worker or ()), tuple(engine_args or ()), logprobs_mode, gpus=gpus
        ),
        (*mode, *shlex.split(worker_args)),
        arguments,
        settings,
    )
    arguments = arguments.with_tokenizer(model)
    _hide_torch()
    GatewayProcess(source, arguments, settings, bundled(model) or Path(model)).run()


@with_flags
def gateway(
    worker: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a worker, or URL,ADMIN_URL to update its weights too; may be repeated."
        ),
    ] = None,
    discover: Annotated[
        str | None,
        typer.Option(
            help="URL, or URL,ADMIN_URL, with a host name that has the addresses of all workers, "
            "such as a headless Kubernetes Service; it is looked up all the time."
        ),
    ] = None,
    dynamo: Annotated[
        str | None,
        typer.Option(help="URL of a Dynamo frontend; DYN_RL_PORT is where it lists its workers."),
    ] = None,
    transport: Annotated[
        TransportName | None,
        typer.Option(help="API of the workers; detected by default."),
    ] = None,
    logprobs_mode: Annotated[
        LogprobMode | None,
        typer.Option(help="How the workers compute logprobs, where they do not report it."),
    ] = None,
    wait_seconds: Annotated[float, typer.Option(help="Seconds to wait for the workers.")] = 60.0,
    workers_join: Annotated[
        bool,
        typer.Option(
            "--workers-join",
            help="Start without workers: they register themselves at the admin port.",
        ),
    ] = False,
    model_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the weights that the workers start with, which updates are checked "
            "against; known to `lockstep serve`."
        ),
    ] = None,
    *,
    arguments: GatewayArguments,
) -> None:
    """Start only a gateway, in front of workers that run already or join later."""
    settings = Settings.read()
    worker_options: dict[str, Any] = {"api_key": settings.worker_api_key}
    if transport is not None:
        worker_options["transport"] = transport
    if logprobs_mode is not None:
        worker_options["logprob_mode"] = logprobs_mode
    named = bool(worker) + bool(discover) + bool(dynamo) + workers_join
    stored = (arguments.store or settings.store) is not None and named == 0
    if named > 1 or (named == 0 and not stored):
        raise BadRequest(
            "give one of --worker URL, --discover URL, --dynamo URL and --workers-join, or --store "
            "for the workers of the gateways that share it",
            param="worker",
        )
    urls = [part for value in (*(worker or ()), discover or "") for part in value.split(",")]
    for url in [url for url in (*urls, dynamo or "") if url]:
        if not url.startswith(("http://", "https://")):
            raise BadRequest(f"{url!r} is not a URL: expected http://HOST:PORT", param="worker")
    uncontrolled = [url for url in worker or () if "," not in url]
    if arguments.require_proof == "held" and uncontrolled:
        raise BadRequest(
            f"--require-proof held needs the admin port of {uncontrolled[0]}: without it nothing "
            "is known of the weights it computes with; give --worker URL,ADMIN_URL",
            param="require_proof",
        )
    source: WorkerSource
    if workers_join:
        if arguments.gateway.tokenizer is None:
            raise BadRequest(
                "--workers-join needs --tokenizer: no worker has joined yet that could name the "
                "model",
                param="tokenizer",
            )
        source = JoiningWorkers(arguments.gateway.tokenizer)
    elif stored:
        source = StoredWorkers(wait_seconds)
    elif discover:
        source = DnsWorkers.parse(
            discover,
            worker_options=worker_options,
            wait_seconds=wait_seconds,
            admin_token=settings.worker_admin_token,
        )
    elif dynamo:
        source = DynamoWorkers(dynamo, worker_options, wait_seconds)
    else:
        source = RunningWorkers(
            tuple(worker or ()), worker_options, wait_seconds, settings.worker_admin_token
        )
    flags: list[str] = [part for url in worker or () for part in ("--worker", url)]
    values = {"discover": discover, "dynamo": dynamo, "transport": transport,
              "logprobs-mode": logprobs_mode, "wait-seconds": wait_seconds}  # fmt: skip
    for name, value in values.items():
        flags += [] if value is None else [f"--{name}", str(value)]
    flags += ["--workers-join"] if workers_join else []
    _hide_torch()
    GatewayProcess(source, arguments, settings, model_dir, flags=tuple(flags)).run()


def _hide_torch() -> None:
    """Keep transformers from importing torch, which would be half of the memory of this process.

    A gateway only tokenizes; the workers of `serve` are processes of their own.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
