"""Which engine the workers of a command have: the embedded one, or vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.backends.registry import EngineName
from lockstep.cli.extras import require_extra
from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.sources import EmbeddedWorkers, WorkerSource
from lockstep.models import bundled
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest, UnknownModel

if TYPE_CHECKING:
    from lockstep.settings import Settings


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and how many workers are started with it.

    `urls` are of vLLM servers that run already, `vllm_args` are options of those that are started.
    `adapters` says that adapters will come and go while they sample.
    """

    engine: EngineName
    count: int
    urls: tuple[str, ...] = ()
    vllm_args: tuple[str, ...] = ()
    logprob_mode: LogprobMode | None = None
    adapters: bool = False


def worker_source(
    model: str,
    choice: EngineChoice,
    worker_args: tuple[str, ...],
    arguments: GatewayArguments,
    settings: Settings,
) -> WorkerSource:
    """The workers that were chosen; `worker_args` are options of `lockstep worker`.

    Raises BadRequest for options of the other engine, and UnknownModel.
    """
    if choice.engine == "vllm":
        return _vllm(model, choice, arguments, settings)
    if choice.urls or choice.vllm_args:
        raise BadRequest(
            "--worker and options after -- are for vLLM servers: add --engine vllm",
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
    return EmbeddedWorkers(model, choice.count, worker_args, arguments.gateway.drain_seconds)


def _vllm(
    model: str, choice: EngineChoice, arguments: GatewayArguments, settings: Settings
) -> WorkerSource:
    from lockstep.cli.serving.vllm_workers import RunningVllm, VllmWorkers
    from lockstep.launch.interpreter import VLLM, find_python

    if choice.urls:
        return RunningVllm(
            choice.urls, settings.worker_api_key, choice.logprob_mode, choice.adapters
        )
    if any(one.partition("=")[0] == "--logprobs-mode" for one in choice.vllm_args):
        raise BadRequest(
            "--logprobs-mode stands after --: give it to lockstep serve, before --, as responses "
            "must say which logprobs they hold",
            param="logprobs_mode",
        )
    python = find_python(VLLM, settings.vllm_python)
    return VllmWorkers(
        model,
        choice.count,
        choice.vllm_args,
        python,
        arguments.gateway.drain_seconds,
        choice.logprob_mode or "processed",
    )
