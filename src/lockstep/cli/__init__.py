"""The `lockstep` command: every subcommand, and how errors reach the terminal."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lockstep import __version__
from lockstep.cli import checkpoints, dynamo
from lockstep.cli.check import check
from lockstep.cli.doctor import doctor
from lockstep.cli.evidence.audit import audit
from lockstep.cli.evidence.bisect import bisect
from lockstep.cli.evidence.explain import explain
from lockstep.cli.evidence.pack import pack
from lockstep.cli.evidence.replay import replay
from lockstep.cli.extras import missing_extra
from lockstep.cli.running import control, export, keys
from lockstep.cli.running.dashboard import dashboard
from lockstep.cli.running.record import record
from lockstep.cli.serve import gateway, serve
from lockstep.cli.tinker import tinker
from lockstep.cli.training.demo import demo
from lockstep.cli.training.rollout import rollout
from lockstep.cli.training.train import train
from lockstep.cli.worker import worker
from lockstep.http.tls import TlsFiles, use_for_clients
from lockstep.settings import Settings
from lockstep.tokens import LockstepError
from lockstep.tokens.exit_codes import DISK, FULL, TRY_AGAIN, WRONG, exit_code

app = typer.Typer(
    name="lockstep",
    no_args_is_help=True,
    add_completion=False,
    help="Keep an RL trainer and its LLM inference workers in lockstep: token for token, weight "
    "version for weight version.\n\nStart with: lockstep demo",
)
app.command()(demo)
app.command()(doctor)
app.command()(serve)
app.command()(gateway)
app.command()(worker)
app.command()(train)
app.command()(replay)
app.command()(bisect)
app.command()(audit)
app.command()(pack)
app.command()(explain)
app.command()(tinker)
app.command()(rollout)
app.command()(check)
app.command(rich_help_panel=control.PANEL)(dashboard)
# Without interspersed arguments the options of the agent stay its own, with or without `--`.
app.command(context_settings={"allow_interspersed_args": False})(record)
app.add_typer(dynamo.app, name="dynamo")
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(keys.app, name="keys")
app.add_typer(export.app, name="export")
control.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """The options of the command itself; its help is that of `app`."""


@app.command()
def version() -> None:
    """Print the version."""
    sys.stdout.write(f"lockstep {__version__}\n")


def main() -> None:
    """Run the `lockstep` command. Print a Lockstep error in one line and exit with the code of its
    kind.
    """
    try:
        settings = Settings.read()
        use_for_clients(TlsFiles(cert=settings.tls_cert, key=settings.tls_key, ca=settings.tls_ca))
        level = settings.log_level.upper()
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
        app()
    except LockstepError as error:
        console = Console(stderr=True)
        console.print(f"[bold red]error[/] ({error.code}): {escape(error.message)}", soft_wrap=True)
        for note in getattr(error, "__notes__", ()):
            console.print(f"[dim]{escape(note)}[/]")
        raise SystemExit(exit_code(error)) from None
    except OSError as error:
        if error.errno not in DISK:
            raise
        where = f": {error.filename}" if error.filename else ""
        console = Console(stderr=True)
        console.print(f"[bold red]error[/] (disk): {error.strerror}{escape(where)}", soft_wrap=True)
        for note in getattr(error, "__notes__", ()):
            console.print(f"[dim]{escape(note)}[/]", soft_wrap=True)
        raise SystemExit(TRY_AGAIN if error.errno in FULL else WRONG) from None
    except ModuleNotFoundError as error:
        command = " ".join(["lockstep", *sys.argv[1:2]])
        if (message := missing_extra(error, command)) is None:
            raise
        Console(stderr=True).print(
            f"[bold red]error[/] (missing_extra): {escape(message)}", soft_wrap=True
        )
        raise SystemExit(WRONG) from None
