"""The engine of a command's workers: the embedded one, or servers of another."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.backends.registry import LAUNCHED, EngineName
from lockstep.cli.extras import require_extra
from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.sources import EmbeddedWorkers, WorkerSource
from lockstep.models import bundled
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest, UnknownModel

if TYPE_CHECKING:
    from lockstep.launch.placement import Placement
    from lockstep.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and the number of workers to start with it.

    `urls` are servers of the engine that run already, `engine_args` are options of servers to
    start.
    `adapters` says that adapters are loaded and unloaded while workers sample. `gpus` is the value
    of `--gpus`; None: all visible ones.
    """

    engine: EngineName
    count: int
    urls: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = ()
    logprob_mode: LogprobMode | None = None
    adapters: bool = False
    gpus: str | None = None


def worker_source(
    model: str,
    choice: EngineChoice,
    worker_args: tuple[str, ...],
    arguments: GatewayArguments,
    settings: Settings,
) -> WorkerSource:
    """Return the source of the workers; `worker_args` are options of `lockstep worker`.

    Raises BadRequest for options of the other engine and for GPUs that cannot hold the workers,
    and UnknownModel.
    """
    if choice.engine != "lockstep":
        return _servers(model, choice, arguments, settings)
    if choice.urls or choice.engine_args:
        others = " or ".join(f"--engine {name}" for name in LAUNCHED if name != "lockstep")
        raise BadRequest(
            f"--worker and options after -- are for servers of another engine: add {others}",
            param="engine",
        )
    config = (bundled(model) or Path(model)) / "config.json"
    if not config.is_file():
        raise UnknownModel(
            f"{config} does not exist: expected tiny, tiny-moe, or a directory with a Hugging Face "
            f"model; `hf download {model} --local-dir DIRECTORY` gets one from the Hub",
            param="model",
        )
    require_extra("engine")
    placement = _embedded_placement(config.parent, choice, worker_args)
    return EmbeddedWorkers(
        model, choice.count, worker_args, arguments.gateway.drain_seconds, placement
    )


def _embedded_placement(
    directory: Path, choice: EngineChoice, worker_args: tuple[str, ...]
) -> Placement | None:
    from lockstep.launch.placement import embedded_gpus, embedded_memory, place

    size = embedded_gpus(worker_args, choice.gpus)
    if size == 0:
        return None
    placement = place(choice.count, size, choice.gpus)
    if placement is not None:
        placement.check_memory(embedded_memory(directory, worker_args))
    elif choice.count > 1 and choice.gpus is None:
        raise BadRequest(
            f"{choice.count} workers need a GPU each, but this machine has no nvidia-smi to list "
            "its GPUs: name them, as in --gpus 0-7, or give --gpus none for workers that share "
            "what this process sees",
            param="gpus",
        )
    return placement


def _servers(
    model: str, choice: EngineChoice, arguments: GatewayArguments, settings: Settings
) -> WorkerSource:
    from lockstep.cli.serving.server_workers import LaunchedServers, RunningServers
    from lockstep.launch.interpreter import SGLANG, VLLM, find_python

    if choice.urls:
        if choice.gpus is not None:
            raise BadRequest(
                "--gpus is for servers that this command starts: leave out one of --gpus and "
                "--worker",
                param="gpus",
            )
        return RunningServers(
            choice.engine, choice.urls, settings.worker_api_key, choice.logprob_mode,
            choice.adapters,
        )  # fmt: skip
    if any(argument.partition("=")[0] == "--logprobs-mode" for argument in choice.engine_args):
        raise BadRequest(
            "--logprobs-mode is after --: pass it to lockstep serve, before --, because responses "
            "must state which logprobs they hold",
            param="logprobs_mode",
        )
    vllm = choice.engine == "vllm"
    if not vllm and choice.gpus not in (None, "none"):
        raise BadRequest(
            f"--gpus {choice.gpus} is not supported with --engine sglang: start each server with "
            "CUDA_VISIBLE_DEVICES set, and give their URLs with --worker",
            param="gpus",
        )
    python = (
        find_python(VLLM, settings.vllm_python)
        if vllm
        else find_python(SGLANG, settings.sglang_python)
    )
    return LaunchedServers(
        choice.engine,
        model,
        choice.count,
        choice.engine_args,
        python,
        arguments.gateway.drain_seconds,
        choice.logprob_mode or "processed",
        _vllm_placement(choice, python) if vllm else None,
        check_model=not vllm and _is_sglang_for_cpu(python),
    )


def _is_sglang_for_cpu(python: Path) -> bool:
    from lockstep.launch.sglang import is_for_cpu

    return is_for_cpu(str(python))


def _vllm_placement(choice: EngineChoice, python: Path) -> Placement | None:
    from lockstep.launch.placement import place, vllm_group_size, vllm_memory
    from lockstep.launch.vllm import is_for_cpu

    size = vllm_group_size(choice.engine_args)
    if size == 0 and choice.gpus not in (None, "none"):
        raise BadRequest(
            f"--gpus {choice.gpus} has no effect with --distributed-executor-backend ray, which "
            "chooses the GPUs itself: leave out one of them",
            param="gpus",
        )
    if size == 0 or (choice.gpus is None and is_for_cpu(str(python))):
        return None
    placement = place(choice.count, size, choice.gpus)
    if placement is not None:
        placement.check_memory(vllm_memory(choice.engine_args))
    elif choice.count > 1 and choice.gpus is None:
        log.warning(
            "%d vLLM servers see the same devices: this machine has no nvidia-smi to list its "
            "GPUs; name them with --gpus",
            choice.count,
        )
    return placement
