"""`lockstep state`, `pause`, `resume`, `update-weights` and the rest: a fleet from the shell.

Exit codes: 0 it happened, 1 it did not, 2 the command itself was wrong.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from lockstep.cli.fleet_view import fleet_view
from lockstep.cli.tables import table_console
from lockstep.fleet.remote import RemoteFleet
from lockstep.models import model_directory
from lockstep.running_gateways import find_control_plane
from lockstep.settings import Settings
from lockstep.tokens.errors import LockstepError
from lockstep.tokens.operation import Operation

Url = Annotated[
    str | None,
    typer.Option(
        help="The gateway's admin URL; else LOCKSTEP_ADMIN_URL, or the one that runs here."
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the admin token; else the gateway's, or LOCKSTEP_ADMIN_TOKEN."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

STATUS = {"pause": "paused", "resume": "resumed"}
SHOWN = ("mode", "lora_name")
"""What --json repeats of a request, as the control plane's own answer does."""


def state(
    url: Url = None,
    token_file: TokenFile = None,
    watch: Annotated[bool, typer.Option(help="Keep it on the screen, live.")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Show URLs, whole reasons and the last operations.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the fleet: version, pause, workers, adapters, last operations."""

    async def show(fleet: RemoteFleet) -> None:
        if as_json:
            _say(await fleet.state())
            return
        console = table_console()
        if not watch:
            console.print(fleet_view(await fleet.state(), details=details))
            return
        with Live(console=console, refresh_per_second=4) as live:
            while True:
                live.update(fleet_view(await fleet.state(), details=details))
                await asyncio.sleep(0.5)

    _run(url, token_file, show)


def workers(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List the workers, one line each."""

    async def show(fleet: RemoteFleet) -> None:
        rows = (await fleet.state())["workers"]
        if as_json:
            _say(rows)
            return
        for row in rows:
            sys.stdout.write(
                f"{row['id']}\t{row['state']}\t{row['version']}\t{row['reason'] or ''}\n"
            )

    _run(url, token_file, show)


def pause(
    mode: Annotated[str, typer.Option(help="keep, wait or abort.")] = "keep",
    lease: Annotated[
        float | None, typer.Option(help="Seconds after which the fleet resumes by itself.")
    ] = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Stop generating on every worker."""
    _act(url, token_file, as_json, lambda fleet: fleet.pause(mode, lease_seconds=lease))  # type: ignore[arg-type]


def resume(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Generate again on every worker."""
    _act(url, token_file, as_json, lambda fleet: fleet.resume())


def update_weights(
    directory: Annotated[
        str, typer.Argument(help="A checkpoint directory, or a bundled model by its name.")
    ],
    version: Annotated[
        str | None, typer.Option(help="Label of the new weights; by default its name.")
    ] = None,
    mode: Annotated[str, typer.Option(help="How to pause: keep, wait or abort.")] = "keep",
    key: Annotated[str | None, typer.Option(help="Idempotency key.")] = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Update the weights of every worker, verified."""
    _act(
        url,
        token_file,
        as_json,
        lambda fleet: fleet.update_weights(model_directory(directory), version, mode=mode, key=key),  # type: ignore[arg-type]
    )


def load_lora(
    name: str,
    path: Path,
    version: Annotated[str | None, typer.Option(help="Put before its label.")] = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Serve a LoRA adapter on every worker, swapping one of that name."""
    _act(url, token_file, as_json, lambda fleet: fleet.load_adapter(name, path, version))


def unload_lora(
    name: str, url: Url = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Stop serving a LoRA adapter."""
    _act(url, token_file, as_json, lambda fleet: fleet.unload_adapter(name))


def drain(
    worker: str,
    seconds: Annotated[float, typer.Option(help="How long to wait for its requests.")] = 30.0,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Take a worker out: nothing new for it, then forget it."""

    async def act(fleet: RemoteFleet) -> None:
        answer = await fleet.drain(worker, drain_seconds=seconds)
        if as_json:
            _say(answer)
        else:
            Console().print(f"worker {worker} is drained and forgotten", markup=False)

    _run(url, token_file, act)


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    panel = "A running fleet"
    for command in (
        state, workers, pause, resume, update_weights, load_lora, unload_lora, drain,
    ):  # fmt: skip
        app.command(rich_help_panel=panel)(command)


def _act(
    url: str | None,
    token_file: Path | None,
    as_json: bool,
    call: Callable[[RemoteFleet], Awaitable[Operation]],
) -> None:
    async def act(fleet: RemoteFleet) -> None:
        operation = await call(fleet)
        if as_json:
            asked = {name: operation.request[name] for name in SHOWN if name in operation.request}
            status = STATUS.get(operation.kind, "ok")
            shown = msgspec.to_builtins(operation)
            _say({"status": status, **asked, "version": operation.version, "operation": shown})
            return
        said = [f"{operation.kind} done"]
        if operation.version:
            said.append(f"version {operation.version}")
        if operation.pause_seconds is not None:
            said.append(f"paused for {operation.pause_seconds * 1e3:.0f} ms")
        Console().print(", ".join(said))
        for name, result in operation.workers.items():
            if result.status != "ok":
                shown = escape(f"{name}: {result.status}: {result.error}")
                Console(stderr=True).print(f"[red]{shown}[/]")

    _run(url, token_file, act)


def _run(
    url: str | None, token_file: Path | None, work: Callable[[RemoteFleet], Awaitable[None]]
) -> None:
    where, token = find_control_plane(url, token_file, Settings.read())

    async def main() -> None:
        async with RemoteFleet(where, token=token) as fleet:
            await work(fleet)

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    except LockstepError as error:
        if error.status == 400:
            raise
        Console(stderr=True).print(
            f"[bold red]failed[/] ({error.code}): {escape(error.message)}",
            soft_wrap=True,
        )
        raise typer.Exit(1) from None


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
