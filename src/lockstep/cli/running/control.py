"""`lockstep state`, `pause`, `resume`, `update-weights` and others: commands for a running fleet.

Exit codes: 0 done, 1 failed, 2 wrong arguments.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from lockstep.cli.derived_flags import with_flags
from lockstep.cli.output import print_json, table_console
from lockstep.cli.running.fleet_view import fleet_view
from lockstep.flags import Flag
from lockstep.fleet.remote import RemoteFleet
from lockstep.models import model_directory
from lockstep.progress import Progress
from lockstep.running_gateways import find_control_plane
from lockstep.settings import Settings
from lockstep.tokens.errors import LockstepError
from lockstep.tokens.exit_codes import FAILED, OK
from lockstep.tokens.operation import Operation

Mode = Annotated[
    Literal["keep", "wait", "abort"],
    typer.Option(
        help="How running requests are treated: keep (pause them and continue later), wait "
        "(finish them first) or abort."
    ),
]
PANEL = "Commands for a running fleet"
STATUS = {"pause": "paused", "resume": "resumed"}
SHOWN = ("mode", "lora_name")
"""Fields of the request that --json repeats, as the control plane's responses do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConnection:
    """The control plane that a command talks to, and how it prints the result."""

    url: Annotated[
        str | None,
        Flag(
            "Admin URL of the gateway; by default LOCKSTEP_ADMIN_URL, or the gateway that "
            "runs on this machine."
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        Flag(
            "File with the admin token; by default the file that a gateway on this machine "
            "has written, or LOCKSTEP_ADMIN_TOKEN."
        ),
    ] = None
    as_json: Annotated[bool, Flag("Print JSON, for scripts.", name="json")] = False

    def run(self, work: Callable[[RemoteFleet], Awaitable[None]]) -> None:
        """Run `work` on the fleet. Raises typer.Exit if the fleet reports a failure."""
        url, token = find_control_plane(self.url, self.token_file, Settings.read())

        async def main() -> None:
            async with RemoteFleet(url, token=token) as fleet:
                await work(fleet)

        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            raise typer.Exit(OK) from None
        except LockstepError as error:
            if error.status == 400:
                raise
            Console(stderr=True).print(
                f"[bold red]failed[/] ({error.code}): {escape(error.message)}", soft_wrap=True
            )
            raise typer.Exit(FAILED) from None

    def operate(self, call: Callable[[RemoteFleet], Awaitable[Operation]]) -> None:
        """Run an operation on the fleet and print its result."""

        async def work(fleet: RemoteFleet) -> None:
            with Progress("Running the operation", visible=not self.as_json):
                operation = await call(fleet)
            if self.as_json:
                _print_operation_json(operation)
            else:
                _print_operation(operation)

        self.run(work)


@with_flags
def state(
    watch: Annotated[
        bool, typer.Option(help="Keep showing the state, updated twice a second.")
    ] = False,
    details: Annotated[
        bool,
        typer.Option(
            "--details", help="Also show URLs, full reasons and the results of operations."
        ),
    ] = False,
    *,
    connection: FleetConnection,
) -> None:
    """Show the fleet: weight version, workers, adapters, last operations."""

    async def show(fleet: RemoteFleet) -> None:
        if connection.as_json:
            print_json(await fleet.state())
            return
        console = table_console()
        if not watch:
            console.print(fleet_view(await fleet.state(), details=details))
            return
        with Live(console=console, refresh_per_second=4) as live:
            while True:
                live.update(fleet_view(await fleet.state(), details=details))
                await asyncio.sleep(0.5)

    connection.run(show)


@with_flags
def workers(*, connection: FleetConnection) -> None:
    """List the workers, one line each."""

    async def show(fleet: RemoteFleet) -> None:
        rows = (await fleet.state())["workers"]
        if connection.as_json:
            print_json(rows)
            return
        for row in rows:
            sys.stdout.write(
                f"{row['id']}\t{row['state']}\t{row['version']}\t{row['reason'] or ''}\n"
            )

    connection.run(show)


@with_flags
def pause(
    mode: Mode = "keep",
    lease: Annotated[
        float | None,
        typer.Option(help="Seconds after which the fleet resumes by itself; by default never."),
    ] = None,
    *,
    connection: FleetConnection,
) -> None:
    """Pause generation on every worker."""
    connection.operate(lambda fleet: fleet.pause(mode, lease_seconds=lease))


@with_flags
def resume(*, connection: FleetConnection) -> None:
    """Resume generation on every worker."""
    connection.operate(lambda fleet: fleet.resume())


@with_flags
def update_weights(
    directory: Annotated[
        str,
        typer.Argument(help="Directory of the checkpoint, or a bundled model (tiny, tiny-moe)."),
    ],
    version: Annotated[
        str | None,
        typer.Option(help="Version label of the new weights; by default the directory's name."),
    ] = None,
    mode: Mode = "keep",
    key: Annotated[
        str | None,
        typer.Option(help="Idempotency key: a repeated command with the same key changes nothing."),
    ] = None,
    *,
    connection: FleetConnection,
) -> None:
    """Load new weights on every worker. A worker must prove that it has them before it serves."""
    connection.operate(
        lambda fleet: fleet.update_weights(model_directory(directory), version, mode=mode, key=key)
    )


@with_flags
def load_lora(
    name: Annotated[str, typer.Argument(help="Name that requests use as their model.")],
    path: Annotated[Path, typer.Argument(help="Directory of the adapter.")],
    version: Annotated[
        str | None, typer.Option(help="Version label; a digest of the contents is added to it.")
    ] = None,
    *,
    connection: FleetConnection,
) -> None:
    """Load a LoRA adapter on every worker, replacing an adapter of the same name."""
    connection.operate(lambda fleet: fleet.load_adapter(name, path, version))


@with_flags
def unload_lora(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")],
    *,
    connection: FleetConnection,
) -> None:
    """Unload a LoRA adapter from every worker."""
    connection.operate(lambda fleet: fleet.unload_adapter(name))


@with_flags
def drain(
    worker: Annotated[str, typer.Argument(help="Id of the worker, as `lockstep state` shows it.")],
    seconds: Annotated[
        float, typer.Option(help="Longest time to wait for its running requests.")
    ] = 30.0,
    *,
    connection: FleetConnection,
) -> None:
    """Remove a worker: it gets no new requests, finishes its running ones, and leaves the fleet."""

    async def act(fleet: RemoteFleet) -> None:
        result = await fleet.drain(worker, drain_seconds=seconds)
        if connection.as_json:
            print_json(result)
        else:
            Console().print(f"worker {worker} is drained and no longer in the fleet", markup=False)
        if not (await fleet.state())["serving"]:
            _warn(
                "no worker is serving; requests are rejected until one does. `lockstep state` "
                "lists the workers"
            )

    connection.run(act)


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    for command in (
        state, workers, pause, resume, update_weights, load_lora, unload_lora, drain,
    ):  # fmt: skip
        app.command(rich_help_panel=PANEL)(command)


def _print_operation_json(operation: Operation) -> None:
    request = operation.request
    print_json(
        {
            "status": STATUS.get(operation.kind, "ok"),
            **{name: request[name] for name in SHOWN if name in request},
            "version": operation.version,
            "operation": msgspec.to_builtins(operation),
        }
    )


def _warn(warning: str) -> None:
    Console(stderr=True).print(f"[yellow]{escape(f'warning: {warning}')}[/]", soft_wrap=True)


def _print_operation(operation: Operation) -> None:
    parts = [f"{operation.kind} done"]
    if operation.version:
        parts.append(f"version {operation.version}")
    if operation.pause_seconds is not None:
        parts.append(f"paused for {operation.pause_seconds * 1e3:.0f} ms")
    Console().print(", ".join(parts))
    for warning in operation.warnings:
        _warn(warning)
    for name, result in operation.workers.items():
        if result.status != "ok":
            message = escape(f"{name}: {result.status}: {result.error}")
            Console(stderr=True).print(f"[red]{message}[/]")
