"""SGLang servers as child processes: their command, environment and supervisor.

`python -m lockstep.launch.sglang PARENT PYTHON MODEL [HOST:]PORT [SGLang options]` runs one server
with the flags and environment that Lockstep needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lockstep.backends.sglang import cpu_stubs
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

MODULE = "lockstep.launch.sglang"
RESERVED = ("--host", "--port", "--model-path", "--model")
READY = "/ready"
KERNELS = "sglang-kernel"
"""Distribution of SGLang's CUDA kernels, which an environment for CPUs does not have."""
ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
STUBS = Path(next(iter(cpu_stubs.__path__)))
CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
    # By default SGLang would take most of the machine's memory.
    "--mem-fraction-static", "0.1", "--max-total-tokens", "16384",
    "--disable-overlap-schedule", "--disable-cuda-graph",
)  # fmt: skip
CPU_LORA_FLAGS = ("--lora-backend", "torch_native")


def servers(
    model: str,
    count: int,
    *,
    logprob_mode: LogprobMode = "processed",
    arguments: Sequence[str] = (),
    **options: Any,
) -> Supervisor:
    """Return a supervisor of `count` SGLang servers of `model`.

    `arguments` are SGLang's own; `options` are those of `engine_servers`. Raises BadRequest for a
    count below 1, or an option that Lockstep sets itself.
    """
    check_arguments(arguments)
    mode = {ORIGINAL_LOGPROB: "1" if logprob_mode == "raw" else "0"}
    return engine_servers(MODULE, model, count, arguments=arguments, environ=mode, **options)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise BadRequest for an option that Lockstep sets itself."""
    reject_reserved(arguments, RESERVED)


def command(
    python: str, model: str, port: str, arguments: Sequence[str], *, cpu: bool
) -> list[str]:
    """Return the command that starts the server. Options in `arguments` override the defaults."""
    path, name = model_path_and_name(model)
    host, _, number = port.rpartition(":")
    cpu_flags: tuple[str, ...] = CPU_FLAGS if cpu else ()
    if cpu and "--enable-lora" in arguments:
        cpu_flags += CPU_LORA_FLAGS
    return [
        python, "-m", "sglang.launch_server",
        "--host", host or "127.0.0.1", "--port", number,
        "--model-path", path,
        "--served-model-name", name,
        "--log-level", "warning",
        *cpu_flags,
        *arguments,
    ]  # fmt: skip


def environment(base: Mapping[str, str], *, cpu: bool) -> dict[str, str]:
    """Return the environment of the server. Variables that are set already keep their values."""
    if not cpu:
        return dict(base)
    modules = os.pathsep.join(filter(None, (str(STUBS), base.get("PYTHONPATH"))))
    # oneDNN must not use AMX: some hypervisors list it and forbid it.
    needed = {"SGLANG_USE_CPU_ENGINE": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    return {**needed, **base, "PYTHONPATH": modules}


def is_for_cpu(python: str) -> bool:
    """Return whether the SGLang of that environment has no CUDA kernels."""
    return not has_package(python, KERNELS)


class SglangServer(EngineServer):
    """One SGLang server, with the processes that it starts itself."""

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
            environment(environ, cpu=cpu),
            health=READY,
            log=log,
        )


if __name__ == "__main__":
    sys.exit(run_server("SGLang", SglangServer, sys.argv[1:]))
