"""The engine process that a Ray actor starts, and with which it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.backends.registry import EngineName
from lockstep.tokens.errors import BadRequest, EngineFailure
from lockstep.tokens.exit_codes import WRONG

LOOPBACK = ("127.", "::1", "localhost")
STOP_SECONDS = 40.0
VLLM_LOGPROBS = "processed"
"""The logprob mode that vLLM is started with; vLLM does not report it itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """The command that starts each worker of a fleet.

    `python` is the interpreter with the engine: Lockstep's own for the embedded engine, that of
    vLLM's environment for vLLM. `arguments` are those of `lockstep worker`, or of vLLM. `insecure`
    allows admin ports on a network without TLS.
    """

    model: str
    engine: EngineName = "lockstep"
    arguments: tuple[str, ...] = ()
    python: str | None = None
    api_key: str | None = None
    insecure: bool = False

    def line(self, worker_id: str, host: str) -> list[str]:
        """Return the command line for a node with that address.

        Raises BadRequest for vLLM on a network without `insecure`: its admin routes take no token.
        """
        parent = str(os.getpid())
        if self.engine == "lockstep":
            insecure = ("--insecure",) if self.insecure else ()
            # -P: files in the working directory of Ray's actors must not be imported as modules.
            return [
                self.python or sys.executable, "-P", "-m", "lockstep.cli.parent_death", parent,
                "worker", self.model, "--host", host, "--system-host", host,
                "--worker-id", worker_id, *insecure, *self.arguments,
            ]  # fmt: skip
        if not host.startswith(LOOPBACK) and not self.insecure:
            raise BadRequest(
                f"vLLM would listen on {host}, and its admin routes take no token: pass "
                "insecure=True if only gateways and trainers can reach that network",
                param="insecure",
            )
        return [
            sys.executable, "-P", "-m", "lockstep.launch.vllm", parent,
            self.python or sys.executable, self.model, f"{host}:{_free_port(host)}",
            "--logprobs-mode", f"{VLLM_LOGPROBS}_logprobs", *self.arguments,
        ]  # fmt: skip

    def environment(self, base: Mapping[str, str], token: str) -> dict[str, str]:
        """Return the environment of the process: the actor's, with this fleet's secrets."""
        environ = {name: value for name, value in base.items() if not name.startswith("LOCKSTEP_")}
        environ["LOCKSTEP_ADMIN_TOKEN"] = token
        if self.api_key is not None:
            environ["LOCKSTEP_API_KEYS"] = self.api_key
            environ["VLLM_API_KEY"] = self.api_key
        return environ


class NodeProcess:
    """A running worker process. The constructor returns when the worker is ready.

    Create it in the main thread: the kernel kills the process when the thread that started it ends.
    Raises BadRequest for a wrong command line, and EngineFailure if the worker ends for another
    reason.
    """

    def __init__(self, command: NodeCommand, worker_id: str, host: str, token: str) -> None:
        self._process = subprocess.Popen(
            command.line(worker_id, host),
            env=command.environment(os.environ, token),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        fields = self._ready_line()
        self.url: str = fields["url"]
        self.admin_url: str = fields.get("system_url", self.url)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        """Wait for the end of the process, draining its output, and return the exit code."""
        if self._process.stdout is not None:
            for _ in self._process.stdout:
                pass
        return self._process.wait()

    def stop(self) -> None:
        """Terminate the process after its running requests; kill it after STOP_SECONDS."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready_line(self) -> dict[str, Any]:
        for line in self._process.stdout or ():
            if line.startswith(b"{"):
                return msgspec.json.decode(line, type=dict[str, Any])
        code = self._process.wait()
        error = BadRequest if code == WRONG else EngineFailure
        raise error(f"the worker ended with code {code} before it was ready: see its message above")


def _free_port(host: str) -> int:
    """Return a free port, for a server that cannot choose its own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
