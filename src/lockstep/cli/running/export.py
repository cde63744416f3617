"""`lockstep export samples SOURCE...`: samples in the formats of other programs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec
import typer

from lockstep.cli.derived_flags import with_flags
from lockstep.cli.output import print_json
from lockstep.cli.running.control import FleetConnection
from lockstep.export.exported import ExportedSample, is_run, samples_of_file, samples_of_run
from lockstep.export.traces import openenv_trace, verifiers_trace
from lockstep.fleet.remote import RemoteFleet
from lockstep.progress import Progress
from lockstep.running_gateways import find_control_plane
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest

app = typer.Typer(no_args_is_help=True, help="Write samples in the formats of other programs.")
Format = Literal["jsonl", "parquet", "verifiers", "openenv"]


@app.callback()
def export() -> None:
    """Write samples in the formats of other programs."""


@app.command()
@with_flags
def samples(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Directories of training runs, files of samples (JSON lines), or ids of sessions "
            "of the gateway."
        ),
    ],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="jsonl: one sample per line; parquet: a Hugging Face dataset; verifiers, "
            "openenv: one trace per line.",
        ),
    ] = "jsonl",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write, by default standard output; for parquet a directory.",
        ),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(help="Kinds of branches of sessions, separated by commas; by default all."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Bundled model or directory whose tokenizer writes texts of verifiers."),
    ] = None,
    *,
    connection: FleetConnection,
) -> None:
    """Export samples: token ids, which were sampled, their logprobs and weight versions.

    An exported session counts as read, as one that a trainer has read does.
    """
    if form == "parquet" and output is None:
        raise BadRequest("--format parquet needs --output, a directory", param="output")
    with Progress("Exporting samples") as progress:
        samples = progress.each(_samples(sources, kinds, connection))
        if form == "parquet" and output is not None:
            from lockstep.export.parquet import write_parquet

            count = write_parquet(samples, output)
        else:
            count = _write_lines(samples, _encoder(form, tokenizer), output)
    if output is not None:
        print_json({"samples": count, "format": form, "output": str(output)})


def _samples(
    sources: Sequence[str], kinds: str | None, connection: FleetConnection
) -> Iterator[ExportedSample]:
    for source in sources:
        path = Path(source)
        if is_run(path):
            yield from samples_of_run(path)
        elif path.is_file():
            yield from samples_of_file(path)
        elif path.is_dir():
            raise BadRequest(
                f"{source} is a directory without a training run: expected run.json and "
                "metrics.jsonl in it",
                param="source",
            )
        else:
            yield from _samples_of_session(source, kinds, connection)


def _samples_of_session(
    session: str, kinds: str | None, connection: FleetConnection
) -> list[ExportedSample]:
    """Return the samples of a session. Raises NotFound if the gateway has no such session,
    BadRequest if there is no gateway.
    """
    url, token = find_control_plane(connection.url, connection.token_file, Settings.read())

    async def fetch() -> list[ExportedSample]:
        async with RemoteFleet(url, token=token) as fleet:
            samples = await fleet.samples(
                session, kinds=None if kinds is None else kinds.split(",")
            )
        return [
            ExportedSample(sample=sample, source=session, index=index)
            for index, sample in enumerate(samples)
        ]

    return asyncio.run(fetch())


def _encoder(form: Format, tokenizer: str | None) -> Callable[[ExportedSample], Any]:
    if form == "openenv":
        return openenv_trace
    if form == "verifiers":
        decode: Callable[[Sequence[int]], str] = lambda ids: ""  # noqa: E731
        if tokenizer is not None:
            from lockstep.render import Renderer

            decode = Renderer.load(tokenizer).tokenizer.decode
        return lambda exported: verifiers_trace(exported, decode)
    return lambda exported: msgspec.Raw(exported.sample.to_json())


def _write_lines(
    samples: Iterable[ExportedSample], encode: Callable[[ExportedSample], Any], output: Path | None
) -> int:
    count = 0
    with _opened(output) as file:
        for exported in samples:
            file.write(msgspec.json.encode(encode(exported)) + b"\n")
            count += 1
    return count


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[bytes]]:
    """Open the output: a file that appears only once it is complete, or standard output."""
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = output.with_name(f".{output.name}.tmp")
    try:
        with open(scratch, "wb") as file:
            yield file
        scratch.replace(output)
    finally:
        scratch.unlink(missing_ok=True)
