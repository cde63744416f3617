"""Servers of other engines as child processes, each inside a small process that announces when it
is ready.

`python -m MODULE PARENT PYTHON MODEL [HOST:]PORT [options]` runs one server, unpatched, and ends
with it or with PARENT; the module of an engine calls `run_server` with the server's command.
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
from collections.abc import Callable, Mapping, Sequence
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


def engine_servers(
    module: str,
    model: str,
    count: int,
    *,
    python: Path,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    placement: Placement | None = None,
    **options: Any,
) -> Supervisor:
    """Return a supervisor of `count` servers of `model`, each started by `python -m module`.

    `arguments` are the engine's own, `environ` is added to this process's environment, `options`
    are those of Supervisor. With a `placement`, each server sees its own GPUs only, also after a
    restart. Raises BadRequest for a count below 1.
    """
    names = worker_names(count)
    seconds = start_seconds(model)

    def command(child: Child) -> Command:
        launcher = (sys.executable, "-P", "-m", module, str(os.getpid()))
        port = child.url.rpartition(":")[2]
        own = {} if placement is None else placement.environ(names.index(child.id))
        return Command(
            (*launcher, str(python), model, port, *arguments),
            {**os.environ, **(environ or {}), **own},
            ready_seconds=seconds + GRACE_SECONDS,
        )

    return Supervisor(names, command, **options)


def reject_reserved(arguments: Sequence[str], reserved: Sequence[str]) -> None:
    """Raise BadRequest for an option that Lockstep sets itself."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in reserved:
            raise BadRequest(f"{name} is set by lockstep: leave it out", param=name)


def model_path_and_name(model: str) -> tuple[str, str]:
    """Return the path of a bundled model or a directory and its name; else the hub's name twice."""
    path = bundled(model) or Path(model)
    return (str(path.resolve()), path.name) if path.is_dir() else (model, model)


def has_package(python: str, distribution: str) -> bool:
    """Return whether a distribution is installed in the environment of that Python."""
    check = f"import importlib.metadata as m; m.version({distribution!r})"
    return not subprocess.run([python, "-c", check], capture_output=True, check=False).returncode


class EngineServer:
    """One server of an engine, with the processes that it starts itself."""

    def __init__(
        self,
        command: Sequence[str],
        port: str,
        environ: Mapping[str, str],
        *,
        health: str = "/health",
        log: IO[str] | None = None,
    ) -> None:
        self.url = f"http://{port if ':' in port else f'127.0.0.1:{port}'}"
        self._health = health
        self.process = subprocess.Popen(
            list(command),
            env=dict(environ),
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
                with urllib.request.urlopen(f"{self.url}{self._health}", timeout=5):
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


def run_server(
    title: str,
    start: Callable[[str, str, str, Sequence[str]], EngineServer],
    arguments: Sequence[str],
) -> int:
    """Run one server until it or the parent ends; return its exit code.

    `arguments` are those of the command line, `start` gets the Python, the model, the port and the
    engine's own options.
    """
    parent, python, model, port, *own = arguments
    exit_with_parent(int(parent))
    server = start(python, model, port, own)
    seconds = start_seconds(model)

    def stop(*_: object) -> None:
        server.process.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    try:
        if not server.wait_healthy(seconds):
            code = server.stop()
            sys.stderr.write(
                f"{title} was not healthy after {seconds:.0f} s, or ended (code {code})\n"
            )
            return 1
        say_ready(url=server.url)
        return server.process.wait()
    finally:
        server.kill()
