"""`lockstep worker MODEL`: one process with the embedded engine, behind HTTP or Dynamo."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.cli.dynamo_network import DynamoNetwork
from lockstep.cli.shared_options import takes
from lockstep.http.server.limits import DRAIN_SECONDS, LIMITS, parse_limits
from lockstep.http.tls import TlsFiles
from lockstep.protocol.json.strict import LIMITS as REQUEST_LIMITS
from lockstep.settings import Settings
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.numerics import PORTABLE_ENVIRONMENT
from lockstep.tracing import traced

_listen_option = partial(typer.Option, rich_help_panel="Listening")
_engine_option = partial(typer.Option, rich_help_panel="Engine")


@takes(DynamoNetwork, "network")
def worker(
    model: Annotated[
        str,
        typer.Argument(
            help="A bundled model (tiny, tiny-moe) or a directory with a Hugging Face model."
        ),
    ] = "tiny",
    script: Annotated[
        Path | None,
        typer.Option(
            help="File of rules (JSON lines) that decides what is said, in place of the model: for "
            "tests of agents, with 131,072 tokens of context."
        ),
    ] = None,
    runtime: Annotated[
        Literal["http", "dynamo"],
        _listen_option(
            help="http: an HTTP server; dynamo: registered with an NVIDIA Dynamo frontend."
        ),
    ] = "http",
    host: Annotated[str, _listen_option(help="Address to listen on for requests.")] = "127.0.0.1",
    port: Annotated[int, _listen_option(help="Port for requests; 0: any free port.")] = 0,
    system_port: Annotated[
        int, _listen_option(help="Port of the admin routes; 0: any free port.")
    ] = 0,
    system_host: Annotated[
        str, _listen_option(help="Address to listen on for the admin routes.")
    ] = "127.0.0.1",
    tls_cert: Annotated[
        Path | None,
        _listen_option(help="PEM file of the certificate of both ports; read again on change."),
    ] = None,
    tls_key: Annotated[Path | None, _listen_option(help="PEM file of its key.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        _listen_option(help="PEM file of those whose certificates all clients need."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        _listen_option(help="Site whose web pages may call the worker; may be repeated."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        _listen_option(help="Limit of requests and connections, as NAME=NUMBER; may be repeated."),
    ] = None,
    insecure: Annotated[
        bool,
        _listen_option(
            "--insecure", help="Let other machines connect without an API key (LOCKSTEP_API_KEYS)."
        ),
    ] = False,
    trace: Annotated[
        bool,
        _listen_option("--trace", help="Send spans of requests to an OpenTelemetry collector."),
    ] = False,
    served_model_name: Annotated[
        str | None,
        _listen_option(help="Name of the model in requests; by default the directory's."),
    ] = None,
    checkpoint_root: Annotated[
        list[Path] | None,
        _listen_option(help="Directory that weights may be loaded from; may be repeated."),
    ] = None,
    drain_seconds: Annotated[
        float, _listen_option(help="Seconds that running requests get after SIGTERM.")
    ] = DRAIN_SECONDS,
    device: Annotated[str, _engine_option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        _engine_option(help="Data type of weights and KV cache."),
    ] = "float32",
    arithmetic: Annotated[
        Literal["auto", "exact", "portable", "close"],
        _engine_option(
            help="exact: logprobs equal the trainer's bit for bit; portable: also when the "
            "trainer's CPU is of another make; close: the fastest kernels; auto: exact if a "
            "self-test at start passes, else close."
        ),
    ] = "auto",
    threads: Annotated[int, _engine_option(help="Threads that torch computes with.")] = 1,
    max_model_len: Annotated[
        int | None,
        _engine_option(help="Most tokens of prompt and completion; by default the model's limit."),
    ] = None,
    max_num_seqs: Annotated[int, _engine_option(help="Most sequences in one batch.")] = 64,
    max_num_batched_tokens: Annotated[int, _engine_option(help="Most tokens in one step.")] = 1024,
    kv_cache_mb: Annotated[
        int, _engine_option(help="Megabytes of KV cache for running sequences.")
    ] = 2048,
    prefix_cache_mb: Annotated[
        int, _engine_option(help="Megabytes of KV cache for shared prefixes; 0: off.")
    ] = 256,
    logprobs_mode: Annotated[
        LogprobMode,
        _engine_option(
            help="processed: of the distribution that tokens are drawn from, after temperature, "
            "top-p, penalties and the like; raw: of the model's own. Requests may choose the other."
        ),
    ] = "processed",
    return_routed_experts: Annotated[
        bool,
        _engine_option(
            "--return-routed-experts",
            help="Return the routed experts of a mixture-of-experts model for every request.",
        ),
    ] = False,
    weight_version: Annotated[
        str, _engine_option(help="Version label of the weights it starts with.")
    ] = "default",
    worker_id: Annotated[
        str | None, _engine_option(help="Name of this worker in its responses.")
    ] = None,
    max_loras: Annotated[int, _engine_option(help="Most LoRA adapters at a time.")] = 32,
    max_lora_rank: Annotated[int, _engine_option(help="Highest rank of a LoRA adapter.")] = 64,
    warm_seconds: Annotated[
        float,
        _engine_option(help="On a GPU: most seconds to compile and capture before it is ready."),
    ] = 300.0,
    *,
    network: DynamoNetwork,
) -> None:
    """Start one worker with the embedded engine, which takes and returns token ids.

    When ready it prints one JSON line with its URLs. Admin routes need the bearer token
    LOCKSTEP_ADMIN_TOKEN; without one, a token is generated and the JSON line names its file. The
    data port needs one of LOCKSTEP_API_KEYS, if that is set.

    Exit codes: 0 it was stopped, 2 the command is wrong (do not start it again), 75 the engine
    failed, or a lease or server that it needs was lost (start it again).
    """
    if runtime == "dynamo":
        _join_network(network)  # before torch is loaded, which takes seconds
    elif network.given:
        raise BadRequest(
            "--discovery, --request-plane, --event-plane and --advertise are for --runtime dynamo: "
            "leave them out, or give it",
            param="runtime",
        )
    if arithmetic == "portable":  # torch reads it when it is loaded
        os.environ.update(PORTABLE_ENVIRONMENT)
    from lockstep.engine import EngineOptions
    from lockstep.http.auth import check_origins
    from lockstep.worker.dynamo.worker import run_dynamo_worker
    from lockstep.worker.serve import WorkerOptions, run_worker

    settings = Settings.read()
    limits, http = parse_limits(limit or (), REQUEST_LIMITS, LIMITS)
    if script is not None and runtime == "dynamo":
        raise BadRequest(
            "--script is for --runtime http: leave out one of --script and --runtime dynamo",
            param="script",
        )
    start = run_dynamo_worker if runtime == "dynamo" else run_worker
    if script is not None:
        from lockstep.scripted.core import scripted_engine

        start = partial(run_worker, make_engine=scripted_engine(script))
    run = traced("lockstep-worker", on=trace or settings.trace)(start)
    run(
        WorkerOptions(
            model=model,
            served_name=served_model_name,
            host=host,
            port=port,
            system_port=system_port,
            admin_token=settings.admin_token,
            api_keys=settings.api_keys,
            insecure=insecure,
            system_host=system_host,
            tls=TlsFiles.of_listener(tls_cert, tls_key, tls_client_ca),
            origins=check_origins(allow_origin or ()),
            http=http,
            limits=limits,
            checkpoint_roots=tuple(checkpoint_root or ()),
            drain_seconds=drain_seconds,
            return_routed_experts=return_routed_experts,
            engine=EngineOptions(
                device=device,
                dtype=dtype,
                arithmetic=arithmetic,
                threads=threads,
                max_model_len=max_model_len,
                max_seqs=max_num_seqs,
                max_batch_tokens=max_num_batched_tokens,
                kv_bytes=kv_cache_mb << 20,
                prefix_cache_bytes=prefix_cache_mb << 20,
                logprob_mode=logprobs_mode,
                weight_version=weight_version,
                worker=worker_id,
                max_adapters=max_loras,
                max_lora_rank=max_lora_rank,
                warm_seconds=warm_seconds,
            ),
        )
    )


def _join_network(network: DynamoNetwork) -> None:
    """Puts into the environment what Dynamo reads there. Raises BadRequest for an address that
    other hosts of the deployment cannot reach, and Unavailable when etcd or NATS does not respond:
    Dynamo itself would wait for it in silence."""
    from lockstep.backends.dynamo.reachable import check_reachable
    from lockstep.protocol.dynamo import environment as dynamo_env

    os.environ.update(network.environ())
    chosen = dynamo_env.SYSTEM_HOST in os.environ
    dynamo_env.check_advertised(dynamo_env.complete(os.environ), chosen=chosen)
    asyncio.run(check_reachable(os.environ))
