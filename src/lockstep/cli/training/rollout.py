"""`lockstep rollout CONFIG.toml`: the rollouts of a training run, written to a file."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lockstep.cli.output import print_json
from lockstep.cli.training.run_config import read_run

if TYPE_CHECKING:
    from lockstep.train.collect import Collected


def rollout(
    config: Annotated[Path, typer.Argument(help="TOML file, as for `lockstep train`.")],
    out: Annotated[
        Path, typer.Option(help="File for the samples, one line of JSON per sample.")
    ] = Path("samples.jsonl"),
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON line for each step and one for the result."),
    ] = False,
) -> None:
    """Run the rollouts of a training configuration and write their samples, without training.

    Use it with another trainer, or to look at rollouts first. No weights are updated, so it also
    runs against a worker that follows a script. Failed rollouts are counted by cause, and their
    samples are left out.

    Exit codes: 0 all rollouts ran, 1 an environment raised, 2 the command is wrong, 75 it cannot
    start or continue now.
    """
    from lockstep.train.collect import collect

    run = read_run(config)
    console = Console(highlight=False)

    def on_step(step: int, total: Collected) -> None:
        if as_json:
            print_json({"step": step, **_plain(total)})
        else:
            console.print(
                f"step {step}: {total.rollouts} rollouts, reward {total.reward:.3f}, "
                f"{total.samples} samples, {total.tokens} sampled tokens"
            )

    total = asyncio.run(collect(run, out, on_step))
    if as_json:
        print_json({"out": str(out), **_plain(total)})
        return
    for cause, count in total.failed:
        console.print(f"[yellow]{count} rollouts failed[/]: {escape(cause)}")
    console.print(f"Wrote {total.samples} samples to {escape(str(out))}")


def _plain(total: Collected) -> dict[str, object]:
    return {**asdict(total), "failed": dict(total.failed)}
