"""The process with the engine that a Ray actor starts, and ends with."""

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
"""How vLLM is told to compute logprobs, which it does not tell itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """How each worker of a fleet is started.

    `python` is the interpreter that has the engine: Lockstep's own for the embedded one, that of
    vLLM's environment for vLLM. `arguments` are those of `lockstep worker`, or vLLM's own.
    `insecure` lets admin ports listen on a network without TLS.
    """

    model: str
    engine: EngineName = "lockstep"
    arguments: tuple[str, ...] = ()
    python: str | None = None
    api_key: str | None = None
    insecure: bool = False

    def line(self, worker_id: str, host: str) -> list[str]:
        """The command line on a node with that address. Raises BadRequest for vLLM on a network
        that nobody called safe: its admin routes take no token."""
        parent = str(os.getpid())
        if self.engine == "lockstep":
            insecure = ("--insecure",) if self.insecure else ()
            # -P: files in the directory that Ray starts actors in are no modules.
            return [
                self.python or sys.executable, "-P", "-m", "lockstep.cli.parent_death", parent,
                "worker", self.model, "--host", host, "--system-host", host,
                "--worker-id", worker_id, *insecure, *self.arguments,
            ]  # fmt: skip
        if not host.startswith(LOOPBACK) and not self.insecure:
            raise BadRequest(
                f"vLLM would listen on {host}, where its admin routes take no token: say "
                "insecure=True if only gateways and trainers reach that network",
                param="insecure",
            )
        return [
            sys.executable, "-P", "-m", "lockstep.launch.vllm", parent,
            self.python or sys.executable, self.model, f"{host}:{_free_port(host)}",
            "--logprobs-mode", f"{VLLM_LOGPROBS}_logprobs", *self.arguments,
        ]  # fmt: skip

    def environment(self, base: Mapping[str, str], token: str) -> dict[str, str]:
        """The environment of the process: that of the actor, with this fleet's secrets."""
        environ = {name: value for name, value in base.items() if not name.startswith("LOCKSTEP_")}
        environ["LOCKSTEP_ADMIN_TOKEN"] = token
        if self.api_key is not None:
            environ["LOCKSTEP_API_KEYS"] = self.api_key
            environ["VLLM_API_KEY"] = self.api_key
        return environ


class NodeProcess:
    """A worker that runs, from the moment it said that it is ready.

    Must be made by the main thread: the system ends the process with the thread that started it.
    Raises BadRequest when it ended because its command is wrong, else EngineFailure.
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
        """Returns the exit code when it has ended. Its output is read, or it would block."""
        if self._process.stdout is not None:
            for _ in self._process.stdout:
                pass
        return self._process.wait()

    def stop(self) -> None:
        """Lets requests end, and kills it if that takes too long."""
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
    """A port for a server that must be told one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
