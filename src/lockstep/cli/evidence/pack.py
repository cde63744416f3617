"""`lockstep pack`: one file of a run that a third party can audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.cli.evidence.replay import JsonOption
from lockstep.cli.output import print_json


def pack(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, such as run.tar.")],
    without_model: Annotated[
        bool,
        typer.Option("--without-model", help="Leave out the model that training started from."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack the chain of a run, the files it names and its model into one file.

    `lockstep audit FILE`, `lockstep replay FILE` and `lockstep bisect` read it. It holds every
    prompt and response of the run, and the configuration with its environment options, but no
    tokens or keys of servers, no checkpoints and no code.
    """
    from lockstep.replay.packing import write_pack

    written = write_pack(run, out, with_model=not without_model)
    if as_json:
        print_json(
            {
                "file": str(written.path),
                "head": written.head,
                "steps": written.steps,
                "files": written.files,
                "left_out": list(written.left_out),
            }
        )
        return
    console = Console(highlight=False)
    console.print(
        f"{written.path}: {written.files} files of {written.steps} steps, head {written.head}",
        soft_wrap=True,
    )
    for name in written.left_out:
        console.print(f"Left out: {name}", markup=False)
