"""`lockstep train CONFIG.toml`: a training run against a served model."""

from __future__ import annotations

import asyncio
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lockstep.cli.output import print_json
from lockstep.cli.training.ranks import RankPlace, resume_hint, start_ranks
from lockstep.cli.training.run_config import parse_changes, read_run
from lockstep.progress import Progress
from lockstep.tokens.errors import BadRequest, Unavailable
from lockstep.tokens.exit_codes import INTERRUPTED

if TYPE_CHECKING:
    from lockstep.train import RunResult, StepMetrics


def train(
    config: Annotated[Path, typer.Argument(help="TOML file that describes the run.")],
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the last complete checkpoint in run_dir."),
    ] = False,
    change: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="With --resume: change a field of the run from here on, such as learner.lr=1e-5; "
            "the change is recorded. May be repeated.",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Fail unless trainer and workers compute the same bits."),
    ] = False,
    track: Annotated[
        list[str] | None,
        typer.Option(
            help="Log to wandb, tensorboard, trackio or mlflow too, as `sinks` in the config does; "
            "may be repeated."
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            help="Environment in place of the config's: reverse, calc, guess, verifiers:NAME, or "
            "package.module:Class."
        ),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY.pem",
            help="Sign every record of the run's chain with this ed25519 key.",
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train on so many processes of this machine, which share out the model (FSDP2): "
            "one per GPU with learner.device cuda. On several machines, use torchrun instead.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON line for each step and one for the result."),
    ] = False,
) -> None:
    """Train a model that `lockstep serve` serves: roll out, learn, update its weights, repeat.

    The admin token is read from the config, from the gateway that runs on this machine, or from
    LOCKSTEP_ADMIN_TOKEN. If trainer and workers cannot compute the same bits, the run continues in
    close mode and says why.

    All files are written to `run_dir` of the config, at the end also `report.html`, a page of the
    run.

    Exit codes: 0 the run ended, 1 an environment raised, 2 the command is wrong or --exact was not
    possible, 75 it cannot start or continue now, 130 it was stopped by Ctrl-C.
    """
    place = RankPlace.read()
    if place is not None:
        place.check(ranks)
        if place.rank:
            return place.follow()
    from lockstep.train import Trainer
    from lockstep.train.demo.report_page import write_report
    from lockstep.train.records.sinks import check_sinks

    run = read_run(config)
    changes = parse_changes(change or [])
    if changes and not resume:
        raise BadRequest(
            f"--change {next(iter(changes))} is for --resume: set it in {config}", param="--change"
        )
    run = run.with_changes(changes)
    if exact:
        run = replace(run, learner=replace(run.learner, exact=True))
    if env is not None:
        # Options belong to one environment: another environment does not accept them.
        options = run.env.options if env == run.env.name else {}
        run = replace(run, env=replace(run.env, name=env, options=options))
    if track:
        run = replace(run, sinks=(*run.sinks, *check_sinks(track)))
    again = resume_hint(config, ranks or 1)
    if place is None and ranks is not None and ranks > 1:
        raise SystemExit(start_ranks(ranks, again, run.run_dir))
    lead = nullcontext() if place is None else place.lead()
    with lead as group, Progress("Training", run.loop.steps, visible=not as_json) as progress:

        def on_step(metrics: StepMetrics) -> None:
            progress.say(_figures(metrics))
            progress.reach(metrics.step)
            if as_json:
                print_json(metrics.to_json())
            elif not sys.stderr.isatty():  # a log gets one line per step
                sys.stdout.write(f"step {metrics.step}/{run.loop.steps}  {_figures(metrics)}\n")
                sys.stdout.flush()

        trainer = Trainer(run, resume=resume, changes=changes, sign=sign, ranks=group)
        try:
            result = asyncio.run(trainer.run(on_step))
        except KeyboardInterrupt:
            sys.stderr.write(f"Stopped; {again} in {run.run_dir}, if there is one yet.\n")
            raise SystemExit(INTERRUPTED) from None
        except OSError as error:
            error.add_note(f"the run directory is {run.run_dir}; once that is fixed, {again}")
            raise
        except Unavailable as error:
            error.add_note(again)
            raise
    _end(result, write_report(result.run_dir), as_json)


def _figures(metrics: StepMetrics) -> str:
    """Format the main figures of a step."""
    return (
        f"reward {metrics.reward:.3f}  solved {metrics.solved:.0%}  "
        f"mismatch_kl {metrics.mismatch_kl:.2g}  masked {metrics.is_masked:.2%}  "
        f"{metrics.tokens_per_second:.0f} tokens/s"
    )


def _end(result: RunResult, report: Path, as_json: bool) -> None:
    last = result.steps[-1] if result.steps else None
    if as_json:
        print_json(
            {
                "run_dir": result.run_dir,
                "report": str(report),
                "version": result.version,
                "reward_before": None if result.before is None else result.before.reward,
                "reward_after": None if result.after is None else result.after.reward,
                "mismatch_kl": None if last is None else last.mismatch_kl,
                "mismatch_max": result.max_difference,
                "skipped": sum(step.skipped for step in result.steps),
                "numerics": result.exactness.to_json(),
            }
        )
        return
    console = Console(highlight=False)
    if result.before is not None and result.after is not None:
        console.print(
            f"Held-out reward [bold]{result.before.reward:.3f}[/] -> "
            f"[bold green]{result.after.reward:.3f}[/] ({result.after.solved:.0%} solved)"
        )
    if not result.exactness.is_exact:
        why = f"{result.max_difference:.1e} because {result.exactness.reason}"
        console.print(f"Trainer and engine are [bold]close[/]: max |Δ| {escape(why)}")
    console.print(
        f"The fleet serves [bold]{result.version}[/]; {report} shows the run", soft_wrap=True
    )
