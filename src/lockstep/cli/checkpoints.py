"""`lockstep checkpoints`: what the directories hold that trainers hand to fleets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lockstep.checkpoint.delta.convert import make_delta, write_full
from lockstep.checkpoint.delta.delta_reader import DeltaReader
from lockstep.checkpoint.delta.prune import prune as prune_checkpoints
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.probe import Probe
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.sliced_reader import SlicedReader
from lockstep.checkpoint.stores.fetch import local_checkpoint
from lockstep.checkpoint.stores.upload_checkpoint import upload
from lockstep.checkpoint.stores.url import is_url
from lockstep.checkpoint.validate import Checkpoint
from lockstep.cli.output import one_line_table, print_json, table_console
from lockstep.progress import Progress

app = typer.Typer(
    no_args_is_help=True, help="Look at checkpoints, and convert, verify and delete them."
)
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.callback()
def checkpoints() -> None:
    """Look at checkpoints, and convert, verify and delete them."""


@app.command()
def show(
    checkpoint: Annotated[str, typer.Argument(help="Directory or URL of a checkpoint.")],
    as_json: JsonOption = False,
) -> None:
    """Show what a checkpoint holds, and which rank wrote how much of it in which time.

    Reads headers only; what is in an object store is fetched. An incomplete or broken checkpoint is
    an error that names the file, tensor, slice or rank.
    """
    with local_checkpoint(_absolute(checkpoint)) as local:
        facts = describe(open_checkpoint(local.directory)) | {"directory": checkpoint}
    if as_json:
        print_json(facts)
        return
    console = Console(highlight=False)
    console.print(f"[bold]{facts['form']}[/] checkpoint, version {facts['version']}")
    console.print(
        f"{facts['tensors']} tensors ({_counts(facts['dtypes'])}), {facts['bytes']:,} bytes"
    )
    console.print(f"probe of {facts['probe_tokens']} tokens" if facts["probe_tokens"] else
                  "no probe: workers cannot prove that they serve these weights")  # fmt: skip
    if facts["delta"] is not None:
        delta = facts["delta"]
        console.print(
            f"delta {delta['depth']} since the last full checkpoint, based on {delta['base']}: "
            f"{delta['nbytes']:,} bytes of {delta['full_bytes']:,}, {delta['changed']:,} of "
            f"{delta['values']:,} values changed"
        )
        console.print("tensors by encoding: " + _counts(delta["encodings"]))
        console.print("read with: " + ", ".join(facts["chain"]))
    if facts["ranks"]:
        rows = [
            [Text(str(row["rank"])), Text(str(row["slices"])), Text(f"{row['bytes']:,}"),
             Text(f"{row['seconds']:.3f}")]
            for row in facts["ranks"]
        ]  # fmt: skip
        table_console().print(one_line_table(["rank", "slices", "bytes", "seconds"], rows))


@app.command("make-delta")
def make_delta_command(
    source: Annotated[Path, typer.Argument(help="Checkpoint to write as a delta.")],
    target: Annotated[Path, typer.Argument(help="New directory for the delta, beside its base.")],
    base: Annotated[Path, typer.Option(help="Checkpoint that the delta changes.")],
) -> None:
    """Write a checkpoint as a lossless delta: only what changed since its base."""
    summary = make_delta(source.absolute(), base.absolute(), target.absolute())
    Console(highlight=False).print(
        f"{target}: {summary.nbytes:,} bytes of {summary.full_bytes:,}, {summary.changed:,} of "
        f"{summary.values:,} values changed ({_counts(summary.encodings)})"
    )


@app.command("apply")
def apply_command(
    source: Annotated[
        str, typer.Argument(help="A delta, or a checkpoint of many ranks: directory or URL.")
    ],
    target: Annotated[Path, typer.Argument(help="New directory for the full checkpoint.")],
) -> None:
    """Write any checkpoint as a full one that every program can load."""
    with local_checkpoint(_absolute(source)) as local:
        size = write_full(local.directory, target.absolute())
    Console(highlight=False).print(f"{target}: a full checkpoint, {size:,} bytes")


@app.command()
def verify(
    checkpoints: Annotated[list[str], typer.Argument(help="Directories or URLs of checkpoints.")],
) -> None:
    """Read checkpoints in full, with their chains, and compare every byte with its digest.

    The first that does not hold what was written is an error that names file, tensor and link.
    """
    for name in checkpoints:
        with local_checkpoint(_absolute(name)) as local:
            checkpoint = Checkpoint.validate(
                local.directory, roots=(local.root.parent,), verify_hashes=True
            )
        Console(highlight=False).print(f"{name}: {checkpoint.digest}, as written")


@app.command("upload")
def upload_command(
    directory: Annotated[Path, typer.Argument(help="Directory of a checkpoint.")],
    url: Annotated[str, typer.Argument(help="Where to store it: s3://BUCKET/RUN/NAME.")],
) -> None:
    """Store a checkpoint in an object store, where workers fetch it.

    Readers reject it until it is complete, so an upload that was interrupted can be repeated. The
    base of a delta belongs beside it: upload that first, under its own name.
    """
    total = sum(path.stat().st_size for path in directory.glob("*") if path.is_file())
    with Progress(f"Uploading {directory.name}", total) as progress:
        stored = upload(directory.absolute(), url, progress.advance)
    rate = f"{stored.nbytes:,} bytes in {stored.seconds:.1f} s"
    Console(highlight=False).print(f"{url}: {rate if stored.nbytes else 'complete already'}")


@app.command()
def prune(
    parent: Annotated[Path, typer.Argument(help="Directory that holds the checkpoints.")],
    keep: Annotated[list[str], typer.Option(help="Name of a checkpoint to keep. Repeatable.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what it would do.")
    ] = False,
) -> None:
    """Delete the checkpoints that none of the kept ones needs.

    A delta needs its base, and so on to the last full checkpoint. Keep what the fleet serves and
    what it may still be rolled back to: `lockstep status` names it.
    """
    paths = prune_checkpoints(parent.absolute(), [Path(name) for name in keep], dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    names = ", ".join(path.name for path in paths) or "nothing"
    Console(highlight=False).print(f"{verb} {names}")


def _absolute(reference: str) -> str:
    return reference if is_url(reference) else str(Path(reference).absolute())


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def describe(reader: CheckpointReader) -> dict[str, Any]:
    """Return the facts of a checkpoint that its headers tell."""
    probe = Probe.beside(reader.directory)
    records = reader.records if isinstance(reader, SlicedReader) else ()
    link = reader.link if isinstance(reader, DeltaReader) else None
    version = probe.version if probe is not None else None
    if records:
        version = records[0].version
    elif link is not None:
        version = link.record.version
    return {
        "directory": str(reader.directory),
        "form": "sliced" if records else "delta" if link is not None else "whole",
        "version": version,
        "tensors": len(reader.tensors),
        "dtypes": dict(Counter(tensor.dtype for tensor in reader.tensors.values())),
        "bytes": sum(tensor.nbytes for tensor in reader.tensors.values()),
        "manifest": Manifest.read(reader.directory) is not None,
        "probe_tokens": 0 if probe is None else sum(map(len, probe.sequences)),
        "delta": None if link is None else asdict(link.summary),
        "chain": [path.name for path in reader.chain.directories]
        if isinstance(reader, DeltaReader)
        else [],
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
