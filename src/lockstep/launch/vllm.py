"""vLLM servers as child processes, each inside a small process that announces when it is ready.

`python -m lockstep.launch.vllm PARENT PYTHON MODEL [HOST:]PORT [vLLM options]` runs one server,
unpatched, with the flags and environment that Lockstep needs, and ends with it or with PARENT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lockstep.http.server.server import say_ready
from lockstep.launch.parent_watch import PR_SET_PDEATHSIG, exit_with_parent
from lockstep.launch.placement import Placement
from lockstep.launch.start_time import start_seconds
from lockstep.launch.supervisor import Child, Command, Supervisor, worker_names
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest

GRACE_SECONDS = 30.0
"""How much longer the parent waits than the process that starts the server, and reports why."""
POLL_SECONDS = 0.25
KILL_SECONDS = 10.0
EXTENSION = "lockstep.backends.vllm.extension.worker.LockstepWorker"
TRANSFER = '{"backend": "lockstep"}'
RESERVED = ("--host", "--port", "--model", "--weight-transfer-config")


def vllm_servers(
    model: str,
    count: int,
    *,
    python: Path,
    arguments: Sequence[str] = (),
    placement: Placement | None = None,
    **options: Any,
) -> Supervisor:
    """Return a supervisor of `count` vLLM servers of `model`.

    `arguments` are vLLM's own; `options` are those of Supervisor. With a `placement`, each server
    sees its own GPUs only, also after a restart. Raises BadRequest for a count below 1, or an
    option that Lockstep sets itself.
    """
    check_arguments(arguments)
    names = worker_names(count)
    seconds = start_seconds(model)

    def command(child: Child) -> Command:
        launcher = (sys.executable, "-P", "-m", "lockstep.launch.vllm", str(os.getpid()))
        port = child.url.rpartition(":")[2]
        environ = {} if placement is None else placement.environ(names.index(child.id))
        return Command(
            (*launcher, str(python), model, port, *arguments),
            {**os.environ, **environ},
            ready_seconds=seconds + GRACE_SECONDS,
        )

    return Supervisor(names, command, **options)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise BadRequest for an option that Lockstep sets itself."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in RESERVED:
            raise BadRequest(f"{name} is set by lockstep: leave it out", param=name)


def command(
    python: str, model: str, port: str, arguments: Sequence[str], *, cpu: bool
) -> list[str]:
    """Return the command that starts the server. Options in `arguments` override the defaults."""
    path = bundled(model) or Path(model)
    host, _, number = port.rpartition(":")
    # By default vLLM loads float32 weights as bfloat16, and crashes then on CPUs that list AMX
    # under a hypervisor that forbids it.
    cpu_flags = ("--enforce-eager", "--dtype", "float32") if cpu else ()  # see TORCHDYNAMO_DISABLE
    return [
        python, "-m", "vllm.entrypoints.openai.api_server",
        "--host", host or "127.0.0.1", "--port", number,
        "--model", str(path.resolve() if path.is_dir() else model),
        "--served-model-name", path.name if path.is_dir() else model,
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
    check = "import importlib.metadata as m; m.version('vllm-cpu')"
    return not subprocess.run([python, "-c", check], capture_output=True, check=False).returncode


class VllmServer:
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
        self.url = f"http://{port if ':' in port else f'127.0.0.1:{port}'}"
        cpu = is_for_cpu(python)
        self.process = subprocess.Popen(
            command(python, model, port, arguments, cpu=cpu),
            env=environment(environ, arguments, cpu=cpu),
            stdin=subprocess.DEVNULL,
            stdout=log or sys.stderr,
            stderr=log,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )

    def wait_healthy(self, seconds: float) -> bool:
        """Return True once it serves; False when it ended, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return True
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(POLL_SECONDS)
        return False

    def stop(self, seconds: float = KILL_SECONDS) -> int:
        """Terminate it, and kill it after `seconds`; return its exit code."""
        self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        finally:
            self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """Kill every process of the server, also those that outlived the first."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all have ended already


def _end_with_parent() -> None:
    # SIGTERM, not SIGKILL: the server must end the processes that it has started.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Run one server until it or the parent ends; return its exit code."""
    parent, python, model, port, *vllm_arguments = arguments
    exit_with_parent(int(parent))
    server = VllmServer(python, model, port, vllm_arguments)
    seconds = start_seconds(model)

    def stop(*_: object) -> None:
        server.process.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    try:
        if not server.wait_healthy(seconds):
            code = server.stop()
            sys.stderr.write(
                f"vLLM was not healthy after {seconds:.0f} s, or ended (code {code})\n"
            )
            return 1
        say_ready(url=server.url)
        return server.process.wait()
    finally:
        server.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
