"""`lockstep explain`: name the cause of a train/inference mismatch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.evidence.replay import print_lines
from lockstep.cli.output import print_json
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.exit_codes import FAILED

Others = Annotated[
    list[str] | None,
    typer.Option(
        "--other",
        metavar="[LABEL=]DIR",
        help="Weights that the engine may have used instead, with their version label if known; "
        "may be repeated. By default earlier checkpoints beside --checkpoint.",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16: what the engine is meant to compute in."),
]


def explain(
    samples: Annotated[
        Path,
        typer.Argument(
            help="Run directory, or JSON lines: our samples, or rollouts of verifiers, prime-rl, "
            "TRL, rllm or OpenEnv."
        ),
    ],
    checkpoint: Annotated[
        str, typer.Option(help="Weights that the tokens are labelled with: a directory.")
    ],
    other: Others = None,
    adapter: Annotated[
        Path | None, typer.Option(help="LoRA adapter that the tokens were sampled with.")
    ] = None,
    other_adapter: Annotated[
        list[Path] | None, typer.Option(help="Adapter that may have been used instead.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.npy|MODULE:FUNCTION",
            help="The trainer's logprobs of all sampled tokens, or a function of the samples.",
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="URL of the live server, which then scores the samples.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOCKSTEP_API_KEY", help="API key of the server.")
    ] = None,
    engine_dtype: DtypeOption = None,
    trainer_dtype: Annotated[
        str | None, typer.Option(help="The same for the trainer; by default the engine's.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory of the tokenizer, if not in --checkpoint.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: where substitutions run.")] = "cpu",
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most sampled tokens that are compared.")
    ] = 2048,
    max_passes: Annotated[int, typer.Option(min=1, help="Most forward passes.")] = 2000,
    max_requests: Annotated[int, typer.Option(min=2, help="Most requests to the server.")] = 32,
    resume: Annotated[
        Path | None, typer.Option(help="Directory in which results are stored and found again.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Zip file to write: everything to reproduce the verdict, no secrets."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Name the cause of a difference between a trainer's and an engine's logprobs.

    The samples are scored again under controlled substitutions: other weights, readings, inputs,
    formats. A cause is named only if its substitution leaves nothing but noise; otherwise the
    verdict is "not explained". The server is asked for scores and never changed.

    Exit codes: 0 healthy, 1 a cause was named or the difference is not explained, 2 the command is
    wrong, 75 the server cannot be reached now.
    """
    from lockstep.explain.run import explain as run

    verdict = run(
        samples, checkpoint, others=_others(other), adapter=adapter,
        other_adapters=other_adapter or (), trainer=trainer, server=server, api_key=api_key,
        engine_dtype=engine_dtype, trainer_dtype=trainer_dtype, tokenizer=tokenizer,
        device=device, max_tokens=max_tokens, max_passes=max_passes, max_requests=max_requests,
        resume=resume, bundle=bundle, progress=not as_json,
    )  # fmt: skip
    if as_json:
        print_json(verdict.to_json())
    else:
        print_lines(verdict.lines())
    if verdict.outcome != "healthy":
        raise typer.Exit(FAILED)


def _others(values: list[str] | None) -> dict[str, str] | list[str] | None:
    """Return the directories by label, or as a list where none has a label."""
    if values is None:
        return None
    labelled = dict(value.split("=", 1) for value in values if "=" in value)
    if labelled and len(labelled) != len(values):
        raise BadRequest(
            "--other: give a label for all directories (LABEL=DIR) or for none", param="--other"
        )
    return labelled or values
