"""`lockstep check URL`: does this server keep the RL contract?

Exit codes: 0 it does, 1 a row failed or could not be asked, 2 the command itself was wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep import __version__
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest, LockstepError

if TYPE_CHECKING:
    from lockstep.check import Finding, Report, Row, Subject

COLOURS = {"pass": "green", "fail": "bold red", "n.a.": "dim", "error": "yellow"}
CHANGES = "Rows that change the server"


def check(
    url: Annotated[str, typer.Argument(help="The server's data URL.")],
    model: Annotated[
        str | None, typer.Option(help="Which model to ask; needed when there are several.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Directory of the model's tokenizer: asks for parity with its text."),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="vllm, dynamo, dynamo-generate or sglang; else the server is asked."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(help="How far logprobs may differ that should be the same; bfloat16: 0.25."),
    ] = 1e-3,
    only: Annotated[
        list[str] | None, typer.Option(help="Ask these rows only, such as 'tokens.*'; repeat it.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Longest time for one request.")] = 60.0,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the key of the data URL.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table.")
    ] = False,
    mutate: Annotated[
        bool,
        typer.Option(help="Ask those rows too: pauses, updates, adapters.",
                     rich_help_panel=CHANGES),
    ] = False,
    admin: Annotated[
        str | None,
        typer.Option(help="The worker's admin URL, or Dynamo's discovery URL.",
                     rich_help_panel=CHANGES),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the admin token (else LOCKSTEP_ADMIN_TOKEN).",
                     rich_help_panel=CHANGES),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Other weights of the model, with a probe if possible.",
                     rich_help_panel=CHANGES),
    ] = None,
    adapter: Annotated[
        list[Path] | None,
        typer.Option(help="A LoRA adapter; give a second one to swap to.",
                     rich_help_panel=CHANGES),
    ] = None,
) -> None:  # fmt: skip
    """Ask any server whether it keeps the RL contract, row by row with evidence."""
    from lockstep.check import Subject, chosen_rows
    from lockstep.check.target import transport_named

    if as_json and as_markdown:
        raise BadRequest("--json and --markdown exclude each other", param="json")
    for directory in (tokenizer, checkpoint, *(adapter or ())):
        if directory is not None and not directory.is_dir():
            raise BadRequest(f"{directory} is not a directory", param="directory")
    rows = chosen_rows(only or (), mutate=mutate)
    subject = Subject(
        url=url,
        model=model,
        transport=transport_named(transport),
        api_key=None if api_key_env is None else os.environ.get(api_key_env),
        tokenizer=tokenizer,
        tolerance=tolerance,
        admin=admin,
        token=_token(token_file),
        mutate=mutate,
        checkpoint=checkpoint,
        adapters=tuple(adapter or ()),
        seconds=seconds,
    )
    quiet = as_json or as_markdown
    try:
        report = asyncio.run(_ask(subject, rows, len(chosen_rows(only or (), mutate=True)), quiet))
    except LockstepError as error:
        if error.status in (400, 401, 403, 404):
            raise
        Console(stderr=True).print(f"[bold red]failed[/] ({error.code}): {escape(error.message)}")
        raise typer.Exit(1) from None
    if as_json:
        sys.stdout.write(json.dumps(report.json(), ensure_ascii=False) + "\n")
    elif as_markdown:
        sys.stdout.write(report.markdown() + "\n")
    else:
        Console().print(_table(report))
    raise typer.Exit(0 if report.kept else 1)


async def _ask(subject: Subject, rows: list[Row], all_rows: int, quiet: bool) -> Report:
    from lockstep.check import Report, ask_rows, open_target

    console = Console(stderr=True, quiet=quiet)
    findings: list[Finding] = []
    async with open_target(subject) as target:
        with console.status("asking") as status:
            async for finding in ask_rows(target, rows):
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


def _table(report: Report) -> Table:
    table = Table(title=f"{report.model} at {report.url} ({report.transport})", show_lines=True)
    for column in ("row", "verdict", "what was asked, and the evidence", "law"):
        table.add_column(column, overflow="fold")
    for one in report.findings:
        colour = COLOURS[one.verdict]
        text = f"[bold]{escape(one.title)}[/]\n{escape(one.evidence)}"
        table.add_row(one.id, f"[{colour}]{one.verdict}[/]", text, one.law)
    table.caption = report.summary()
    return table


def _token(token_file: Path | None) -> str | None:
    if token_file is None:
        return Settings.read().admin_token
    try:
        return token_file.read_text().strip()
    except OSError as error:
        raise BadRequest(
            f"{token_file} cannot be read: {error.strerror}", param="token_file"
        ) from None
