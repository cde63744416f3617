"""`lockstep demo`: train a tiny model, and show that trainer and workers stayed in lockstep."""

from __future__ import annotations

import asyncio
import shlex
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lockstep.cli.derived_flags import with_flags
from lockstep.cli.output import print_json
from lockstep.tokens.errors import EngineFailure
from lockstep.tokens.exit_codes import FAILED
from lockstep.train.demo.options import Demo

if TYPE_CHECKING:
    from lockstep.replay import Replay
    from lockstep.run_record import Summary


@with_flags
def demo(
    *,
    options: partial[Demo],
    worker_args: Annotated[
        str, typer.Option(help="Options of `lockstep worker` for each worker, in one string.")
    ] = "",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object at the end; everything else goes to stderr."
        ),
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run; by default runs/demo-TASK-TIME.")
    ] = None,
) -> None:
    """Train a tiny model on two workers, kill one midway, and report what stayed exact.

    At the end the last step is repeated from the records of the run, and compared with them.

    On a machine that cannot compute exactly, the demo runs in close mode and says why.

    Exit codes: 0 trainer and workers stayed in lockstep, 1 they did not, or the repeated step
    differs, 2 the command is wrong or --exact was not possible, 75 it could not run now.
    """
    from lockstep.train.demo.demo import run_demo

    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    where = run_dir or Path("runs") / f"demo-{options.keywords['task']}-{stamp}"
    console = Console(stderr=as_json, highlight=False)
    summary, page = asyncio.run(
        run_demo(
            options(run_dir=where, worker_args=tuple(shlex.split(worker_args))),
            console,
        )
    )
    repeated = asyncio.run(_repeat_last_step(where, page))
    show(summary, repeated, page, console)
    if as_json:
        print_json({**as_row(summary, page), "replay": repeated.to_json()})
    if not (summary.kept and repeated.held):
        raise typer.Exit(FAILED)


async def _repeat_last_step(run_dir: Path, page: Path) -> Replay:
    """Repeat the last step of the run, sample its tokens again, and mark it in the report."""
    from lockstep.chain.records import last_recorded_step
    from lockstep.replay import audit
    from lockstep.train.demo.report_page import write_report

    last = last_recorded_step(run_dir)
    outcome = await audit(run_dir, steps=None if last is None else [last])
    if outcome.replay is None:
        raise EngineFailure(f"the run was not recorded as it ran: {outcome.problems[0]}")
    write_report(run_dir, page)
    return outcome.replay


def _replayed(repeated: Replay) -> str:
    if not repeated.held:
        return f"step {repeated.last} differs: {repeated.differences[0]}"
    tokens = f", {repeated.tokens} tokens sampled again" if repeated.tokens else ""
    return f"step {repeated.last} repeated from its record: {repeated.digests} digests{tokens}"


def as_row(summary: Summary, page: Path) -> dict[str, object]:
    """Return the results as --json prints them."""
    return {
        "reward_before": summary.reward_before,
        "reward_after": summary.reward_after,
        "mismatch_kl": summary.mismatch_kl,
        "exact": summary.close_bound is None,
        "mismatch": summary.mismatch,
        "mismatch_max": summary.max_difference,
        "compared_logprobs": summary.compared,
        "unequal_logprobs": summary.unequal,
        "masked": summary.masked,
        "breaks": summary.breaks,
        "aborts": summary.aborts,
        "skipped": summary.skipped,
        "versions": summary.versions,
        "pause_seconds": summary.pause_seconds,
        "step_seconds": summary.step_seconds,
        "seconds": summary.seconds,
        "report": str(page),
    }


def show(summary: Summary, repeated: Replay, page: Path, console: Console) -> None:
    """Print the results as text, with their caveat."""
    from lockstep.train.demo.report_page import HONEST

    def line(good: bool | None, name: str, value: str) -> None:
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: " "}[good]
        console.print(f" {mark} {name:<15} [b]{escape(value)}[/]", soft_wrap=True)

    console.print()
    before, after = summary.reward_before, summary.reward_after
    if before is not None and after is not None:
        line(after > before, "reward", f"{before:.3f} → {after:.3f} on held-out prompts")
    line(summary.near, "mismatch_kl", summary.mismatch)
    line(summary.masked == 0, "masked tokens", f"{summary.masked:.2%}" if summary.masked else "0")
    line(summary.breaks == 0, "prefix breaks", str(summary.breaks))
    line(None, "aborted replies", str(summary.aborts))
    if summary.skipped:
        line(None, "skipped steps", f"{summary.skipped}, with nothing to learn from")
    served: dict[str, list[str]] = {version: [] for version in summary.versions.values()}
    for worker, version in summary.versions.items():
        served[version].append(worker)
    weights = "; ".join(f"{version} on {', '.join(on)}" for version, on in served.items())
    line(summary.agreed, "weights", weights)
    longest = f"longest {summary.longest_pause * 1e3:.1f} ms"
    line(None, "pause", f"{summary.pause_seconds * 1e3:.1f} ms per update, {longest}")
    line(
        None, "time", f"{summary.step_seconds:.2f} s per step, {summary.seconds:.0f} s for the run"
    )
    line(repeated.held, "replay", _replayed(repeated))
    console.print(f"\n[dim]{HONEST}[/]\n")
    console.print(f"Report: [b]{page}[/]", soft_wrap=True)
