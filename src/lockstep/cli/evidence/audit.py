"""`lockstep audit`: check the chain of a run, and repeat a random part of it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from lockstep.cli.evidence.replay import (
    JsonOption,
    ModelOption,
    RunArgument,
    TrustOption,
    end_with,
)
from lockstep.cli.training.run_config import import_from_working_directory
from lockstep.progress import Progress


def audit(
    run: RunArgument,
    fraction: Annotated[float, typer.Option(help="Share of the steps to repeat.")] = 0.1,
    draws: Annotated[
        float, typer.Option(help="Share of the rollouts of these steps to sample again.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Choose the same steps and rollouts again.")
    ] = None,
    chain_only: Annotated[
        bool,
        typer.Option(
            "--chain-only", help="Check records, files and signatures; compute nothing again."
        ),
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Public key that must have signed every record."),
    ] = None,
    model: ModelOption = None,
    trust_code: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check the chain of a run, then repeat randomly chosen steps and sample their tokens again.

    The chain says what was learnt from what; links that the trainer did not record are listed, and
    so are inputs that were not computed again. The outcome is added to audits.jsonl of the run
    directory, for its report and the dashboard.

    Exit codes: 0 everything held, 1 something differs, 2 the command is wrong.
    """
    from lockstep.replay.auditing import audit as check

    import_from_working_directory()
    with Progress("Auditing", visible=not as_json) as progress:
        outcome = asyncio.run(
            check(
                run, fraction=fraction, draws=draws, seed=seed, chain_only=chain_only, key=key,
                model=model, trust_code=trust_code,
                on_step=lambda step: progress.say(f"step {step}"),
            )
        )  # fmt: skip
    end_with(outcome, outcome.held, as_json)
