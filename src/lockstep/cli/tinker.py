"""`lockstep tinker MODEL`: a server that recipes for the Tinker API train on."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.status import Status

from lockstep.cli.extras import require_extra
from lockstep.cli.serving.sources import EmbeddedWorkers
from lockstep.http.server.limits import DRAIN_SECONDS
from lockstep.http.server.server import admin_token, run, say_ready, stop_event
from lockstep.http.tls import TlsFiles
from lockstep.settings import Settings, state_home

if TYPE_CHECKING:
    from lockstep.integrations.tinker.server import Ready, TinkerOptions

_engine_option = partial(typer.Option, rich_help_panel="Engine")


def tinker(
    model: Annotated[
        str,
        typer.Argument(help="A bundled model (tiny) or a directory with a Hugging Face model."),
    ] = "tiny",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 8000,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Another name of the model, which recipes may ask for; may be repeated."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of training runs, checkpoints and samplers; by default one for each "
            "model under the user's state home."
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Let other machines connect without an API key (LOCKSTEP_API_KEYS)."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line when ready, and nothing else.")
    ] = False,
    device: Annotated[str, _engine_option(help="cpu or cuda, for training and sampling.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        _engine_option(help="Data type of the base weights."),
    ] = "float32",
    threads: Annotated[int, _engine_option(help="Threads that training computes with.")] = 1,
    workers: Annotated[int, _engine_option(help="Number of processes that sample.")] = 1,
    worker_args: Annotated[
        str, _engine_option(help="Options of `lockstep worker` for each of them, in one string.")
    ] = "",
    max_loras: Annotated[
        int, _engine_option(help="Samplers that a worker holds at a time; more wait on disk.")
    ] = 32,
    max_lora_rank: Annotated[int, _engine_option(help="Highest rank of a LoRA adapter.")] = 64,
) -> None:
    """Start a server of the Tinker API: point TINKER_BASE_URL at it, and recipes train here.

    LoRA adapters are trained in this process and sampled by workers, with equal logprobs where the
    machine allows it. Keys are those of LOCKSTEP_API_KEYS, which must begin with `tml-`; without
    any, every key passes. Checkpoints and samplers survive the server; what was not saved does not.
    """
    require_extra("engine")
    from lockstep.integrations.tinker.server import TinkerOptions

    settings = Settings.read()
    options = TinkerOptions(
        model=model,
        state_dir=state_dir or state_home() / "tinker" / Path(model).name,
        names=tuple(name or ()),
        host=host,
        port=port,
        api_keys=settings.api_keys,
        insecure=insecure,
        tls=TlsFiles.of_listener(tls_cert, tls_key, None),
        device=device,
        dtype=dtype,
        threads=threads,
        slots=max_loras,
        max_rank=max_lora_rank,
    )
    engine = ("--device", device, "--dtype", dtype, "--max-loras", str(max_loras),
              "--max-lora-rank", str(max_lora_rank))  # fmt: skip
    own = (*engine, *shlex.split(worker_args))
    source = EmbeddedWorkers(model, workers, own, DRAIN_SECONDS)
    run(_serve(options, source, settings, as_json=as_json))


async def _serve(
    options: TinkerOptions, source: EmbeddedWorkers, settings: Settings, *, as_json: bool
) -> None:
    from lockstep.fleet.fleet import Fleet
    from lockstep.fleet.routing.pool import Pool
    from lockstep.integrations.tinker.server import serve_tinker

    options.check()
    stop = stop_event()
    status = Status("Starting", console=Console(stderr=True, quiet=as_json))

    def on_ready(ready: Ready) -> None:
        status.stop()
        _print_ready(ready, options, as_json=as_json)

    with admin_token(settings.admin_token) as (token, _), status:
        fleet = Fleet(Pool(), roots=(options.state_dir,), model_dir=options.directory)
        async with source.joined(fleet, token, status.update):
            await serve_tinker(options, fleet, on_ready, stop)


def _print_ready(ready: Ready, options: TinkerOptions, *, as_json: bool) -> None:
    if as_json:
        say_ready(
            url=ready.url,
            model=ready.model,
            state_dir=str(options.state_dir),
            pid=os.getpid(),
            exact=not ready.note,
            note=ready.note,
        )
        return
    out = Console(highlight=False)
    out.print(f"[bold green]Ready[/]: [bold]{ready.url}[/] trains and samples {ready.model}")
    exact = "equal bit for bit" if not ready.note else f"close, not equal ({ready.note})"
    out.print(f"Logprobs of trainer and samplers: {exact}", soft_wrap=True)
    out.print(f"Checkpoints: {options.state_dir}", soft_wrap=True)
    key = "one of LOCKSTEP_API_KEYS" if options.api_keys else "tml-local"
    out.print(
        f"\nexport TINKER_BASE_URL={ready.url} TINKER_API_KEY={key}", soft_wrap=True, markup=False
    )
    out.print(f"model_name in recipes: {options.directory}", soft_wrap=True, markup=False)
