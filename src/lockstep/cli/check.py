"""`lockstep check URL`: does this server keep the contract that RL training needs?

Exit codes: 0 it does, 1 a check failed or could not be made, 2 wrong arguments.
"""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from lockstep import __version__
from lockstep.backends.registry import TransportName
from lockstep.cli.output import one_line_table, print_json, table_console
from lockstep.models import BUNDLED, model_directory
from lockstep.settings import Settings, read_token
from lockstep.tokens.errors import BadRequest, LockstepError
from lockstep.tokens.exit_codes import FAILED, OK

if TYPE_CHECKING:
    from lockstep.check import CheckOptions, CheckRow, Finding, Report

COLOURS = {"pass": "green", "fail": "bold red", "n.a.": "dim", "error": "yellow"}
_mutation_option = partial(typer.Option, rich_help_panel="Checks that change the server")


def check(
    url: Annotated[str, typer.Argument(help="URL of the server, without /v1.")],
    model: Annotated[
        str | None, typer.Option(help="Model to check; needed when the server has several.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tiny, tiny-moe, or the directory of the model's tokenizer, to check that "
            "the server tokenizes and renders text as it does."
        ),
    ] = None,
    transport: Annotated[
        TransportName | None,
        typer.Option(help="API of the server; detected by default."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            help="Largest difference between logprobs that should be equal; 0.25 for bfloat16."
        ),
    ] = 1e-3,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only these checks, such as 'tokens.*'; may be repeated."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Longest time of one request.")] = 60.0,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Name of the environment variable that holds the server's API key."),
    ] = None,
    details: Annotated[
        bool,
        typer.Option("--details", help="Show what every check looks for, and its full evidence."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the result as a Markdown table.")
    ] = False,
    mutate: Annotated[
        bool,
        _mutation_option(help="Also run the checks that pause, update weights and load adapters."),
    ] = False,
    admin: Annotated[
        str | None,
        _mutation_option(
            help="Admin URL of the worker, or the URL where Dynamo lists its workers."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        _mutation_option(help="File with the admin token; by default LOCKSTEP_ADMIN_TOKEN."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        _mutation_option(
            help="Directory of other weights of the same model, with a probe if possible."
        ),
    ] = None,
    adapter: Annotated[
        list[Path] | None,
        _mutation_option(help="Directory of a LoRA adapter; give a second one to check swapping."),
    ] = None,
) -> None:
    """Check that a server keeps the contract RL training needs, and show the evidence."""
    from lockstep.check import CheckOptions, chosen_rows

    if as_json and as_markdown:
        raise BadRequest("give --json or --markdown, not both", param="json")
    tokenizer_dir = _directory(tokenizer, "tokenizer")
    checkpoint_dir = _directory(checkpoint, "checkpoint")
    adapters = tuple(_existing(path, "adapter") for path in adapter or ())
    rows = chosen_rows(only or (), mutate=mutate)
    options = CheckOptions(
        url=url,
        model=model,
        transport=transport,
        api_key=None if api_key_env is None else os.environ.get(api_key_env),
        tokenizer=tokenizer_dir,
        tolerance=tolerance,
        admin=admin,
        token=_token(token_file),
        mutate=mutate,
        checkpoint=checkpoint_dir,
        adapters=adapters,
        seconds=seconds,
    )
    quiet = as_json or as_markdown
    try:
        report = asyncio.run(
            _check(options, rows, len(chosen_rows(only or (), mutate=True)), quiet)
        )
    except LockstepError as error:
        if error.status in (400, 401, 403, 404):
            raise
        Console(stderr=True).print(f"[bold red]failed[/] ({error.code}): {escape(error.message)}")
        raise typer.Exit(FAILED) from None
    if as_json:
        print_json(report.json())
    elif as_markdown:
        sys.stdout.write(report.markdown() + "\n")
    else:
        _show(report, table_console(), details)
    raise typer.Exit(OK if report.kept else FAILED)


async def _check(options: CheckOptions, rows: list[CheckRow], all_rows: int, quiet: bool) -> Report:
    from lockstep.check import Report, open_target, run_rows

    console = Console(stderr=True, quiet=quiet)
    findings: list[Finding] = []
    async with open_target(options) as target:
        with console.status("checking") as status:
            async for finding in run_rows(target, rows):
                findings.append(finding)
                status.update(f"{finding.id}: {finding.verdict} ({len(findings)} of {len(rows)})")
        return Report(
            url=target.transport.base_url,
            transport=target.transport.name,
            model=target.card.id,
            version=__version__,
            findings=tuple(findings),
            held_back=all_rows - len(rows),
        )


def _show(report: Report, console: Console, details: bool) -> None:
    """Print one line per check, then the evidence of those that failed, or of all with
    `details`.
    """
    rows = [
        (
            finding.id,
            Text(finding.verdict, COLOURS[finding.verdict]),
            finding.title if details else finding.evidence,
        )
        for finding in report.findings
    ]
    console.print(Text(f"{report.model} at {report.url} ({report.transport})", "bold"))
    console.print(
        one_line_table(("check", "verdict", "looks for" if details else "evidence"), rows)
    )
    for finding in report.findings:
        if details or finding.verdict in ("fail", "error"):
            colour = COLOURS[finding.verdict]
            console.print(
                f"\n[{colour}]{finding.verdict}[/] [bold]{finding.id}[/] ({finding.law}): "
                f"{escape(finding.title)}"
                f"\n  {escape(finding.evidence)}",
                soft_wrap=True,
            )
    more = "" if details else "; --details shows what each check looks for, and its full evidence"
    console.print(f"\n{escape(report.summary())}{more}", soft_wrap=True)


def _directory(name: str | None, param: str) -> Path | None:
    return None if name is None else _existing(model_directory(name), param)


def _existing(path: Path, param: str) -> Path:
    if not path.is_dir():
        raise BadRequest(
            f"--{param} {path} is not a directory: expected one, or a bundled model "
            f"({', '.join(BUNDLED)})",
            param=param,
        )
    return path


def _token(token_file: Path | None) -> str | None:
    return Settings.read().admin_token if token_file is None else read_token(token_file)
