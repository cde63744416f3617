"""`lockstep worker MODEL`: one embedded engine behind HTTP."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lockstep.http.limits import DRAIN_SECONDS
from lockstep.settings import Settings
from lockstep.tokens.numerics import PORTABLE_ENVIRONMENT

ENGINE = "Engine"
LISTEN = "Listening"


class ArithmeticMode(StrEnum):
    AUTO = "auto"
    EXACT = "exact"
    PORTABLE = "portable"
    CLOSE = "close"


class Runtime(StrEnum):
    HTTP = "http"
    DYNAMO = "dynamo"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LogprobsMode(StrEnum):
    RAW = "raw"
    PROCESSED = "processed"


def worker(
    model: Annotated[
        str, typer.Argument(help="tiny, tiny-moe, or a Hugging Face model directory.")
    ] = "tiny",
    runtime: Annotated[
        Runtime,
        typer.Option(help="http: ports of its own; dynamo: a worker of an NVIDIA Dynamo frontend.",
                     rich_help_panel=LISTEN),
    ] = Runtime.HTTP,
    host: Annotated[
        str, typer.Option(help="Address of the data port.", rich_help_panel=LISTEN)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Data port; 0: any free one.", rich_help_panel=LISTEN)
    ] = 0,
    system_port: Annotated[
        int, typer.Option(help="Port of the admin routes.", rich_help_panel=LISTEN)
    ] = 0,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Serve other machines without LOCKSTEP_API_KEYS.",
            rich_help_panel=LISTEN,
        ),
    ] = False,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Name to serve; by default the directory's.", rich_help_panel=LISTEN),
    ] = None,
    checkpoint_root: Annotated[
        list[Path] | None,
        typer.Option(help="Directory weights may come from; repeat it.", rich_help_panel=LISTEN),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="How long SIGTERM waits for requests.", rich_help_panel=LISTEN)
    ] = DRAIN_SECONDS,
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=ENGINE)] = "cpu",
    dtype: Annotated[
        Dtype, typer.Option(help="Of weights and KV cache.", rich_help_panel=ENGINE)
    ] = Dtype.FLOAT32,
    arithmetic: Annotated[
        ArithmeticMode,
        typer.Option(
            help="exact: logprobs equal a trainer's bit for bit; portable: on another make of CPU "
            "too; auto: exact where a self-test proves it; close: fastest kernels.",
            rich_help_panel=ENGINE,
        ),
    ] = ArithmeticMode.AUTO,
    threads: Annotated[int, typer.Option(help="Torch threads.", rich_help_panel=ENGINE)] = 1,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest prompt plus answer; by default the model's.",
                     rich_help_panel=ENGINE),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Most sequences in one batch.", rich_help_panel=ENGINE)
    ] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens in one step.", rich_help_panel=ENGINE)
    ] = 1024,
    kv_cache_mb: Annotated[
        int, typer.Option(help="Memory for running sequences.", rich_help_panel=ENGINE)
    ] = 2048,
    prefix_cache_mb: Annotated[
        int, typer.Option(help="Memory for cached prefixes; 0: off.", rich_help_panel=ENGINE)
    ] = 256,
    logprobs_mode: Annotated[
        LogprobsMode | None,
        typer.Option(
            help="raw: the model's own; processed: after temperature and truncation. By default "
            "raw, with Dynamo processed.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    weight_version: Annotated[
        str, typer.Option(help="Label of the weights at start.", rich_help_panel=ENGINE)
    ] = "default",
    worker_id: Annotated[
        str | None, typer.Option(help="Name put on completions.", rich_help_panel=ENGINE)
    ] = None,
    max_loras: Annotated[int, typer.Option(help="Most adapters.", rich_help_panel=ENGINE)] = 32,
    max_lora_rank: Annotated[int, typer.Option(help="Highest rank.", rich_help_panel=ENGINE)] = 64,
) -> None:  # fmt: skip
    """Serve one model: tokens in, tokens out.

    When ready it prints one JSON line with its URLs. Admin routes need the bearer token
    LOCKSTEP_ADMIN_TOKEN, or the one in the file that the line names; the data port needs one of
    LOCKSTEP_API_KEYS, where that is set.
    """
    if arithmetic is ArithmeticMode.PORTABLE:  # torch reads it when it is loaded
        os.environ.update(PORTABLE_ENVIRONMENT)
    from lockstep.engine import EngineOptions
    from lockstep.worker.dynamo.worker import run_dynamo_worker
    from lockstep.worker.serve import WorkerOptions, run_worker

    if logprobs_mode is None:  # Dynamo's own workers for RL compute processed ones
        logprobs_mode = LogprobsMode.PROCESSED if runtime is Runtime.DYNAMO else LogprobsMode.RAW
    settings = Settings.read()
    start = run_dynamo_worker if runtime is Runtime.DYNAMO else run_worker
    start(
        WorkerOptions(
            model=model,
            served_name=served_model_name,
            host=host,
            port=port,
            system_port=system_port,
            admin_token=settings.admin_token,
            api_keys=settings.api_keys,
            insecure=insecure,
            checkpoint_roots=tuple(checkpoint_root or ()),
            drain_seconds=drain_seconds,
            engine=EngineOptions(
                device=device,
                dtype=dtype.value,
                arithmetic=arithmetic.value,
                threads=threads,
                max_model_len=max_model_len,
                max_seqs=max_num_seqs,
                max_batch_tokens=max_num_batched_tokens,
                kv_bytes=kv_cache_mb << 20,
                prefix_cache_bytes=prefix_cache_mb << 20,
                logprob_mode=logprobs_mode.value,
                weight_version=weight_version,
                worker=worker_id,
                max_adapters=max_loras,
                max_lora_rank=max_lora_rank,
            ),
        )
    )
