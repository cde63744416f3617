"""`lockstep replay`: repeat the recorded steps of a run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.markup import escape

from lockstep.cli.output import print_json
from lockstep.cli.training.run_config import import_from_working_directory
from lockstep.progress import Progress
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.exit_codes import FAILED

COLOURS = {"DIFFERS": "red", "! ": "red", "- ": "red", "+ ": "green", "@@": "cyan"}
"""Colours of lines by how they start."""
RunArgument = Annotated[Path, typer.Argument(help="Run directory, or file of `lockstep pack`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ModelOption = Annotated[
    str | None,
    typer.Option(help="Model that training started from, where it is at another place here."),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-code", help="For a pack: run the code of its environment, which its author chose."
    ),
]


def replay(
    run: RunArgument,
    steps: Annotated[
        str | None, typer.Option(metavar="A..B", help="Steps to repeat, such as 5..8; or one.")
    ] = None,
    fresh_rollouts: Annotated[
        bool,
        typer.Option(
            "--fresh-rollouts", help="Sample every token again from recorded seeds and weights."
        ),
    ] = False,
    model: ModelOption = None,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Repeat recorded steps and compare them with their records.

    Gradients, optimizer state and weights are computed again from the recorded samples, and rewards
    by environments that are deterministic. On a machine that computes other bits, figures are
    compared within a band. Inputs that were not computed again are listed.

    Exit codes: 0 everything compared is as recorded, 1 something differs, 2 the command is wrong.
    """
    from lockstep.replay.replayer import replay as repeat

    import_from_working_directory()
    first, last = _parse_steps(steps)
    with Progress("Replaying", visible=not as_json) as progress:
        outcome = asyncio.run(
            repeat(
                run, first=first, last=last, fresh_rollouts=fresh_rollouts, model=model,
                trust_code=trust_code,
                on_step=lambda step: progress.say(f"step {step}"),
            )
        )  # fmt: skip
    end_with(outcome, outcome.held, as_json)


def _parse_steps(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match is None:
        raise BadRequest(f"--steps {text}: expected A..B or one number", param="--steps")
    return int(match[1]), int(match[2] or match[1])


class Outcome(Protocol):
    """A result that is printed as JSON, or as lines for a person."""

    def to_json(self) -> dict[str, Any]: ...

    def lines(self) -> Iterator[str]: ...


def end_with(outcome: Outcome, held: bool, as_json: bool) -> None:
    """Print an outcome, and exit with FAILED unless it held."""
    if as_json:
        print_json(outcome.to_json())
    else:
        print_lines(outcome.lines())
    if not held:
        raise typer.Exit(FAILED)


def print_lines(lines: Iterable[str]) -> None:
    """Print sentences, with differences in red, and the lines of a diff in its colours."""
    console = Console(highlight=False)
    for line in lines:
        colour = next((own for mark, own in COLOURS.items() if line.startswith(mark)), None)
        console.print(escape(line), style=colour, soft_wrap=True)
