"""`lockstep tinker MODEL`: a gateway with a trainer, which recipes for the Tinker API use."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.backends.registry import EngineName
from lockstep.cli.extras import require_extra
from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.engine_choice import EngineChoice, worker_source
from lockstep.cli.serving.run import GatewayProcess
from lockstep.cli.shared_options import takes
from lockstep.models import bundled
from lockstep.settings import Settings
from lockstep.storage.api_keys import TINKER_PREFIX
from lockstep.tokens.errors import BadRequest

_engine_option = partial(typer.Option, rich_help_panel="Training and sampling")


@takes(GatewayArguments, "arguments")
def tinker(
    model: Annotated[
        str,
        typer.Argument(help="A bundled model (tiny) or a directory with a Hugging Face model."),
    ] = "tiny",
    vllm_args: Annotated[
        list[str] | None, typer.Argument(help="Options for `vllm serve`, after --.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Another name of the model, which recipes may ask for; may be repeated."),
    ] = None,
    device: Annotated[str, _engine_option(help="cpu or cuda, for training and sampling.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        _engine_option(help="Data type of the base weights."),
    ] = "float32",
    threads: Annotated[int, _engine_option(help="Threads that training computes with.")] = 1,
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
    max_loras: Annotated[
        int, _engine_option(help="Samplers that a worker holds at a time; more wait on disk.")
    ] = 32,
    max_lora_rank: Annotated[int, _engine_option(help="Highest rank of a LoRA adapter.")] = 64,
    no_train_unembed: Annotated[
        bool,
        _engine_option(
            "--no-train-unembed",
            help="Leave the head (lm_head) out of all adapters, whatever recipes ask for: vLLM "
            "cannot serve it.",
        ),
    ] = False,
    *,
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
    from lockstep.integrations.tinker.attached import TrainerOptions

    settings = Settings.read()
    _check(arguments, settings)
    trainer = TrainerOptions(
        model=model,
        names=tuple(name or ()),
        device=device,
        dtype=dtype,
        threads=threads,
        slots=max_loras,
        max_rank=max_lora_rank,
        train_unembed=not no_train_unembed,
    )
    trainer.check()
    # The API's logprobs are the model's own, whatever the temperature.
    loras = ("--max-loras", str(max_loras), "--max-lora-rank", str(max_lora_rank))
    vllm = tuple(vllm_args or ())
    if engine == "vllm" and not worker:
        # Without the head: vLLM 0.32 that may adapt it dies of prompt logprobs, which proofs need,
        # in a batch with other requests.
        targets = ("--lora-target-modules", *TARGETS.split())
        vllm = ("--enable-lora", *loras, *targets, "--dtype", dtype, *vllm)
    source = worker_source(
        model,
        EngineChoice(engine, workers, tuple(worker or ()), vllm, "raw", adapters=True),
        ("--device", device, "--dtype", dtype, *loras, *shlex.split(worker_args)),
        arguments,
        settings,
    )
    arguments = replace(arguments, tokenizer=arguments.tokenizer or model)
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
    if arguments.key_file or settings.key_file:
        return  # it has digests only, and may get such a key at any time
    if keys and not any(key.startswith((TINKER_PREFIX, "eyJ")) for key in keys):
        raise BadRequest(
            f"LOCKSTEP_API_KEYS has no key that begins with {TINKER_PREFIX}, and clients of Tinker "
            "refuse to send others: add one, or give --key-file FILE with a key of `lockstep keys "
            f"add TENANT --prefix {TINKER_PREFIX} --key-file FILE`",
            param="api_keys",
        )
