"""`lockstep tinker MODEL`: a gateway with a trainer, which recipes for the Tinker API use."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lockstep.backends.registry import EngineName
from lockstep.cli.derived_flags import with_flags
from lockstep.cli.extras import require_extra
from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.engine_choice import EngineChoice, worker_source
from lockstep.cli.serving.run import GatewayProcess
from lockstep.integrations.tinker.options import TrainerOptions
from lockstep.models import bundled
from lockstep.settings import Settings
from lockstep.storage.api_keys import TINKER_PREFIX
from lockstep.tokens.errors import BadRequest

SAMPLERS = ("lockstep", "vllm")
"""Engines on which adapters that are trained here were sampled and proved."""

_engine_option = partial(typer.Option, rich_help_panel="Training and sampling")


@with_flags
def tinker(
    model: Annotated[
        str,
        typer.Argument(help="A bundled model (tiny) or a directory with a Hugging Face model."),
    ] = "tiny",
    vllm_args: Annotated[
        list[str] | None, typer.Argument(help="Options for `vllm serve`, after --.")
    ] = None,
    engine: Annotated[
        EngineName,
        _engine_option(
            help="Engine that samples: the embedded one, whose logprobs equal the trainer's, or "
            "vLLM servers, whose logprobs are close to them."
        ),
    ] = "lockstep",
    worker: Annotated[
        list[str] | None,
        _engine_option(
            help="URL of a vLLM server that runs already, see docs/tinker.md for its options; may "
            "be repeated."
        ),
    ] = None,
    workers: Annotated[int, _engine_option(help="Number of processes that sample.")] = 1,
    worker_args: Annotated[
        str, _engine_option(help="Options of `lockstep worker` for every worker, in one string.")
    ] = "",
    gpus: Annotated[
        str | None,
        _engine_option(
            help="GPUs to place the workers on, as for `lockstep serve`. By default all that are "
            "visible; the trainer uses the one of its --device."
        ),
    ] = None,
    *,
    options: partial[TrainerOptions],
    arguments: GatewayArguments,
) -> None:
    """Start a gateway that also trains: set TINKER_BASE_URL to its URL, and Tinker recipes train
    here.

    LoRA adapters are trained in this process and sampled by workers, with equal logprobs where the
    machine allows it. All routes of `lockstep serve` are on the same port with the same keys, and
    samplers are models of chat, messages and responses. Tinker clients send only keys that begin
    with `tml-`: make one with `lockstep keys add TENANT --prefix tml-`. Checkpoints and samplers
    survive a restart of the server; unsaved training state does not.
    """
    require_extra("engine")
    require_extra("tinker")
    from lockstep.backends.vllm.adapter_calls import TARGETS

    settings = Settings.read()
    _check(arguments, settings)
    if engine not in SAMPLERS:
        raise BadRequest(
            f"--engine {engine} is not supported by lockstep tinker: expected "
            f"{' or '.join(SAMPLERS)}",
            param="engine",
        )
    trainer = options(model=model)
    trainer.check()
    # The API's logprobs are the model's own, whatever the temperature.
    loras = ("--max-loras", str(trainer.slots), "--max-lora-rank", str(trainer.max_rank))
    vllm = tuple(vllm_args or ())
    if engine == "vllm" and not worker:
        # Leave out the head: vLLM 0.32 with a head that may be adapted crashes on prompt logprobs,
        # which proofs need, in a batch with other requests.
        targets = ("--lora-target-modules", *TARGETS.split())
        vllm = ("--enable-lora", *loras, *targets, "--dtype", trainer.dtype, *vllm)
    source = worker_source(
        model,
        EngineChoice(engine, workers, tuple(worker or ()), vllm, "raw", adapters=True, gpus=gpus),
        ("--device", trainer.device, "--dtype", trainer.dtype, *loras, *shlex.split(worker_args)),
        arguments,
        settings,
    )
    arguments = arguments.with_tokenizer(model)
    GatewayProcess(source, arguments, settings, bundled(model) or Path(model), trainer).run()


def _check(arguments: GatewayArguments, settings: Settings) -> None:
    """Raise BadRequest for options that a gateway with a trainer cannot have."""
    if arguments.store or settings.store or arguments.gateways > 1:
        raise BadRequest(
            "--store and --gateways are for gateways without a trainer: runs and results are in "
            "the process that trains",
            param="store",
        )
    keys = settings.api_keys
    if arguments.gateway.key_file or settings.key_file:
        return  # the file has only digests, and a key may be added at any time
    if keys and not any(key.startswith((TINKER_PREFIX, "eyJ")) for key in keys):
        raise BadRequest(
            f"LOCKSTEP_API_KEYS has no key that begins with {TINKER_PREFIX}, and clients of Tinker "
            "refuse to send others: add one, or give --key-file FILE with a key of `lockstep keys "
            f"add TENANT --prefix {TINKER_PREFIX} --key-file FILE`",
            param="api_keys",
        )
