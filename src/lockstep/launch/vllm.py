"""vLLM servers as child processes: their command, environment and supervisor.

`python -m lockstep.launch.vllm PARENT PYTHON MODEL [HOST:]PORT [vLLM options]` runs one server with
the flags and environment that Lockstep needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from lockstep.launch.engine_server import (
    EngineServer,
    engine_servers,
    has_package,
    model_path_and_name,
    reject_reserved,
    run_server,
)
from lockstep.launch.supervisor import Supervisor
from lockstep.tokens import LogprobMode

MODULE = "lockstep.launch.vllm"
EXTENSION = "lockstep.backends.vllm.extension.worker.LockstepWorker"
TRANSFER = '{"backend": "lockstep"}'
RESERVED = ("--host", "--port", "--model", "--weight-transfer-config")


def servers(
    model: str,
    count: int,
    *,
    logprob_mode: LogprobMode = "processed",
    arguments: Sequence[str] = (),
    **options: Any,
) -> Supervisor:
    """Return a supervisor of `count` vLLM servers of `model`.

    `arguments` are vLLM's own; `options` are those of `engine_servers`. Raises BadRequest for a
    count below 1, or an option that Lockstep sets itself.
    """
    check_arguments(arguments)
    mode = ("--logprobs-mode", f"{logprob_mode}_logprobs")
    return engine_servers(MODULE, model, count, arguments=(*mode, *arguments), **options)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise BadRequest for an option that Lockstep sets itself."""
    reject_reserved(arguments, RESERVED)


def command(
    python: str, model: str, port: str, arguments: Sequence[str], *, cpu: bool
) -> list[str]:
    """Return the command that starts the server. Options in `arguments` override the defaults."""
    path, name = model_path_and_name(model)
    host, _, number = port.rpartition(":")
    # By default vLLM loads float32 weights as bfloat16, and crashes then on CPUs that list AMX
    # under a hypervisor that forbids it.
    cpu_flags = ("--enforce-eager", "--dtype", "float32") if cpu else ()  # see TORCHDYNAMO_DISABLE
    return [
        python, "-m", "vllm.entrypoints.openai.api_server",
        "--host", host or "127.0.0.1", "--port", number,
        "--model", path,
        "--served-model-name", name,
        "--enable-scale-out",
        "--worker-extension-cls", EXTENSION,
        "--weight-transfer-config", TRANSFER,
        *cpu_flags,
        *arguments,
    ]  # fmt: skip


def environment(base: Mapping[str, str], arguments: Sequence[str], *, cpu: bool) -> dict[str, str]:
    """Return the environment of the server. Variables that are set already keep their values."""
    needed = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if "--enable-lora" in arguments:
        needed["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if cpu:
        # Without the first, the first request with logprobs waits for a compiler. A model that is
        # to be compiled does not start with it, hence --enforce-eager. Without the second, vLLM
        # would take most of the machine's memory.
        needed |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return {**needed, **base}


def is_for_cpu(python: str) -> bool:
    """Return whether the vLLM of that environment is the build for CPUs."""
    return has_package(python, "vllm-cpu")


class VllmServer(EngineServer):
    """One vLLM server, with the processes that it starts itself."""

    def __init__(
        self,
        python: str,
        model: str,
        port: str,
        arguments: Sequence[str],
        *,
        environ: Mapping[str, str] = os.environ,
        log: IO[str] | None = None,
    ) -> None:
        check_arguments(arguments)
        cpu = is_for_cpu(python)
        super().__init__(
            command(python, model, port, arguments, cpu=cpu),
            port,
            environment(environ, arguments, cpu=cpu),
            log=log,
        )


if __name__ == "__main__":
    sys.exit(run_server("vLLM", VllmServer, sys.argv[1:]))
