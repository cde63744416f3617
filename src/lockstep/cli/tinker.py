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
            help="What samples: the embedded engine, whose logprobs are the trainer's, or vLLM "
            "servers, whose logprobs are close to them."
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
        str, _engine_option(help="Options of `lockstep worker` for each of them, in one string.")
    ] = "",
    *,
    options: partial[TrainerOptions],
    arguments: GatewayArguments,
) -> None:
    """Start a gateway that trains too: point TINKER_BASE_URL at it, and Tinker recipes train here.

    LoRA adapters are trained in this process and sampled by workers, with equal logprobs where the
    machine allows it. Everything else of `lockstep serve` is there as well, on the same port and
    with the same keys: samplers are models of chat, messages and responses. Clients of Tinker send
    keys that begin with `tml-` only: make them with `lockstep keys add TENANT --prefix tml-`.
    Checkpoints and samplers survive the server; what was not saved does not.
    """
    require_extra("engine")
    require_extra("tinker")
    from lockstep.backends.vllm.adapter_calls import TARGETS

    settings = Settings.read()
    _check(arguments, settings)
    trainer = options(model=model)
    trainer.check()
    # The API's logprobs are the model's own, whatever the temperature.
    loras = ("--max-loras", str(trainer.slots), "--max-lora-rank", str(trainer.max_rank))
    vllm = tuple(vllm_args or ())
    if engine == "vllm" and not worker:
        # Without the head: vLLM 0.32 that may adapt it dies of prompt logprobs, which proofs need,
        # in a batch with other requests.
        targets = ("--lora-target-modules", *TARGETS.split())
        vllm = ("--enable-lora", *loras, *targets, "--dtype", trainer.dtype, *vllm)
    source = worker_source(
        model,
        EngineChoice(engine, workers, tuple(worker or ()), vllm, "raw", adapters=True),
        ("--device", trainer.device, "--dtype", trainer.dtype, *loras, *shlex.split(worker_args)),
        arguments,
        settings,
    )
    arguments = arguments.with_tokenizer(model)
    GatewayProcess(source, arguments, settings, bundled(model) or Path(model), trainer).run()


def _check(arguments: GatewayArguments, settings: Settings) -> None:
    """Raises BadRequest for what a gateway with a trainer cannot have."""
    if arguments.store or settings.store or arguments.gateways > 1:
        raise BadRequest(
            "--store and --gateways are for gateways without a trainer: runs and results are in "
            "the one process that trains",
            param="store",
        )
    keys = settings.api_keys
    if arguments.gateway.key_file or settings.key_file:
        return  # it has digests only, and may get such a key at any time
    if keys and not any(key.startswith((TINKER_PREFIX, "eyJ")) for key in keys):
        raise BadRequest(
            f"LOCKSTEP_API_KEYS has no key that begins with {TINKER_PREFIX}, and clients of Tinker "
            "refuse to send others: add one, or give --key-file FILE with a key of `lockstep keys "
            f"add TENANT --prefix {TINKER_PREFIX} --key-file FILE`",
            param="api_keys",
        )
