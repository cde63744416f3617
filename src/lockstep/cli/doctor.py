"""`lockstep doctor`: what this machine can do, and how to get what it lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.cli.output import print_json
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.exit_codes import FAILED

if TYPE_CHECKING:
    from lockstep.doctor import Check

MARKS = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "fail": "[red]✗[/]"}
PIPED_COLUMNS = 1000


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with all checks.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Print one row for the table of machines in docs/install.md."
        ),
    ] = False,
) -> None:
    """Check this machine: exact arithmetic, bf16, ports, directories, optional engines.

    Exit codes: 0 `lockstep demo` can run here, 1 something it needs is missing.
    """
    from lockstep.doctor import examine, report_row

    if as_json and report:
        raise BadRequest("give --json or --report, not both", param="json")
    console = Console(stderr=as_json or report, highlight=False)
    with console.status("Checking this machine (a few seconds)"):
        checks = list(examine())
    failed = [check for check in checks if check.status == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": [check.to_json() for check in checks]})
    elif report:
        typer.echo(report_row(checks))
    else:
        rows = table(checks)
        if not console.is_terminal:  # a file has no width: do not wrap or cut lines there
            console.width = PIPED_COLUMNS
        console.print(rows)
        names = ", ".join(check.name for check in failed)
        console.print(
            f"[b red]lockstep demo cannot run here[/]: {escape(names)}"
            if failed
            else "[b green]lockstep demo can run here.[/]"
        )
    if failed:
        raise typer.Exit(FAILED)


def table(checks: list[Check]) -> Table:
    """Return the table of checks, with one line per check where the terminal is wide enough."""
    rows = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for style in ("", "bold", "", "dim"):
        rows.add_column(overflow="fold", no_wrap=style == "bold", style=style)
    for check in checks:
        way_out = f"→ {escape(check.way_out)}" if check.way_out else ""
        rows.add_row(MARKS[check.status], check.name, escape(check.found), way_out)
    return rows
