"""`lockstep bisect`: the first point where two runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.evidence.replay import JsonOption, RunArgument, end_with


def bisect(
    run_a: RunArgument,
    run_b: RunArgument,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with the curves of both run directories."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the first difference of two runs, as a diff.

    Configuration, code, model and arithmetic are compared first. Then, step by step: tasks, seeds,
    tokens, the weights they were sampled under, logprobs, rewards, the batch, gradients, optimizer
    state and weights. Digests are compared first, and only where they differ the values behind
    them. Nothing is computed again.

    Exit codes: 0 the runs are equal, 1 they differ, 2 the command is wrong.
    """
    from lockstep.replay.bisection import bisect as compare

    outcome = compare(run_a, run_b)
    if report is not None:
        from lockstep.run_record import Run
        from lockstep.train.demo.report_page import Compared, write_report

        other = Compared(run_b.name, Run.read(run_b), outcome.step, outcome.summary())
        write_report(run_a, report, other)
    end_with(outcome, outcome.same, as_json)
