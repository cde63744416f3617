"""`lockstep checkpoints`: what the directories hold that trainers hand to fleets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.probe import Probe
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.sliced_reader import SlicedReader
from lockstep.cli.output import one_line_table, print_json, table_console

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints that trainers have written.")
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.callback()
def checkpoints() -> None:
    """Look at checkpoints that trainers have written."""


@app.command()
def show(
    directory: Annotated[Path, typer.Argument(help="Directory of a checkpoint.")],
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds, and which rank wrote how much of it in which time.

    Reads headers only. An incomplete or broken checkpoint is an error that names the file, tensor,
    slice or rank.
    """
    facts = describe(open_checkpoint(directory))
    if as_json:
        print_json(facts)
        return
    console = Console(highlight=False)
    console.print(f"[bold]{facts['form']}[/] checkpoint, version {facts['version']}")
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in facts["dtypes"].items())
    console.print(f"{facts['tensors']} tensors ({dtypes}), {facts['bytes']:,} bytes")
    console.print(f"probe of {facts['probe_tokens']} tokens" if facts["probe_tokens"] else
                  "no probe: workers cannot prove that they serve these weights")  # fmt: skip
    if facts["ranks"]:
        rows = [
            [Text(str(row["rank"])), Text(str(row["slices"])), Text(f"{row['bytes']:,}"),
             Text(f"{row['seconds']:.3f}")]
            for row in facts["ranks"]
        ]  # fmt: skip
        table_console().print(one_line_table(["rank", "slices", "bytes", "seconds"], rows))


def describe(reader: CheckpointReader) -> dict[str, Any]:
    """Return the facts of a checkpoint that its headers tell."""
    probe = Probe.beside(reader.directory)
    records = reader.records if isinstance(reader, SlicedReader) else ()
    version = records[0].version if records else probe.version if probe is not None else None
    return {
        "directory": str(reader.directory),
        "form": "sliced" if records else "whole",
        "version": version,
        "tensors": len(reader.tensors),
        "dtypes": dict(Counter(tensor.dtype for tensor in reader.tensors.values())),
        "bytes": sum(tensor.nbytes for tensor in reader.tensors.values()),
        "manifest": Manifest.read(reader.directory) is not None,
        "probe_tokens": 0 if probe is None else sum(map(len, probe.sequences)),
        "ranks": [
            {
                "rank": record.rank,
                "slices": len(record.slices),
                "bytes": record.nbytes,
                "seconds": record.seconds,
            }
            for record in records
        ],
    }
