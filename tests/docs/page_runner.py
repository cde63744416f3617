"""Does what a page of the documentation says, as its reader would: in order, in a fresh directory.

What differs from a reader: ports are free ones, servers that a page starts are stopped at its end
(or when another one takes their port), training ends after one step, `make` and `pip` only say what
they would do, and of commands that other tests run only the options are tried.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import metadata
from pathlib import Path
from typing import IO

from lockstep.launch.parent_watch import exit_with_parent
from tests.docs.blocks import ROOT, Block
from tests.ports import free_port

PORTS = (8000, 8001, 8100, 8101, 9000, 9001)
PORT = re.compile(rf"(?<=[:= ])({'|'.join(map(str, PORTS))})\b")
SERVER = re.compile(r"^(?:\S+=\S+ )*(?:\S*/)?lockstep (serve|gateway|worker|tinker|dynamo up)\b")
WATCH = re.compile(r"^lockstep .*--watch\b")
READY = ("Ready:", '"event": "ready"', '"event":"ready"', "Ctrl-C")
STEPS = re.compile(r"\bfor step in range\(1, \d+\)")
RUN_ELSEWHERE = {
    "lockstep demo": "tests/train/demo/test_demo.py",
    "lockstep doctor": "tests/cli/test_doctor.py",
}
SHORTER = {
    "examples/reverse.toml": {"steps = 30": "steps = 1", "groups = 16": "groups = 2",
                              "prompts = 64": "prompts = 2"},
    "examples/verifiers/run.toml": {"steps = 5": "steps = 1", "groups = 4": "groups = 1"},
}  # fmt: skip
LINKED = ("scripts", ".venv-vllm", ".venv-sglang", ".venv-dynamo")
COMMAND_SECONDS = 120.0
READY_SECONDS = 180.0
WATCHED_SECONDS = 2.0
STOP_SECONDS = 40.0


class DocumentationError(AssertionError):
    """A block that did not do what its page says."""


@dataclass
class Server:
    """A process of the page that goes on until it is stopped."""

    command: str
    process: subprocess.Popen[bytes]
    output: Path
    ports: frozenset[str]

    def wait_ready(self, place: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            text = self.output.read_text()
            if any(mark in text for mark in READY):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise DocumentationError(
            f"{place}: {self.command}\nis not ready:\n{self.output.read_text()}"
        )

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # what Ctrl-C sends
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                raise DocumentationError(f"{self.command}: Ctrl-C did not end it") from None


@dataclass
class PageRunner:
    """One reader of one page. Use `reading`, which cleans up."""

    directory: Path
    ports: dict[str, str]
    environ: dict[str, str]
    servers: list[Server] = field(default_factory=list)
    python: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> None:
        """Does what the block says. Raises DocumentationError with its place and output."""
        if block.language == "python":
            self._python(block)
            return
        for command in block.commands():
            self._command(command, block.place)

    def close(self) -> None:
        if self.python is not None:
            self.python.kill()
            self.python.wait()
        for server in reversed(self.servers):
            server.stop()

    # Parts

    def _command(self, command: str, place: str) -> None:
        if SERVER.match(command):
            self._start(self._with_ports(self._moved(command)), place)
        elif command.startswith("pip install"):
            _check_install(command, place)
        else:
            if re.match(r"make\b", command):
                command = command.replace("make", f"make --directory {ROOT} --dry-run", 1)
            elif command.startswith(tuple(RUN_ELSEWHERE)):
                command = re.sub(r"( +#.*)?$", " --help", command, count=1)
            elif WATCH.match(command):
                watched = re.sub(r" +#.*$", "", command)
                command = f"timeout --signal INT {WATCHED_SECONDS} {watched} || [ $? = 124 ]"
            self._shell(self._moved(command), place)

    def _shell(self, command: str, place: str) -> None:
        """Runs a command in bash. Its variables and directory hold for what comes after it."""
        kept = self.directory / ".shell"
        script = (
            f"set -eo pipefail; [ ! -f {kept} ] || . {kept}; set -a\n"
            'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'
            f"{command}\n"
            f"{{ export -p; echo \"cd '$PWD'\"; }} > {kept}\n"
            f"env -0 > {kept}.env\n"
        )
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.directory, env=self.environ, timeout=COMMAND_SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode != 0:
            logs = "".join(f"\n--- {each.command}\n{each.output.read_text()[-3000:]}"
                           for each in self.servers)  # fmt: skip
            raise DocumentationError(
                f"{place}: {command}\nended with {done.returncode}:\n{done.stdout[-4000:]}{logs}"
            )
        exported = (self.directory / ".shell.env").read_text().split("\0")
        self.environ = dict(pair.split("=", 1) for pair in exported if "=" in pair)

    def _start(self, command: str, place: str) -> None:
        # Those it listens on: a gateway also names the port of the server before it.
        ports = frozenset(re.findall(r"port[ =](\d{4,5})\b", command))
        for other in [each for each in self.servers if each.ports & ports]:
            other.stop()
            self.servers.remove(other)
        output = self.directory / f".server-{len(self.servers)}-{time.monotonic_ns()}"
        with output.open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"] if "=" not in command.split()[0]
                else ["bash", "-c", f"exec env {command}"],
                cwd=self.directory, env=self.environ, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
                # A run of tests that is killed leaves none behind.
                preexec_fn=partial(exit_with_parent, os.getpid()),
            )  # fmt: skip
        server = Server(command, process, output, ports)
        self.servers.append(server)
        server.wait_ready(place)

    def _with_ports(self, command: str) -> str:
        """The command with the ports that it has by default, where it names none."""
        match = SERVER.match(command)
        kind = match[1] if match else ""
        head, separator, rest = command.partition(" -- ")
        head = re.sub(r" +#.*$", "", head)
        rest = re.sub(r" +#.*$", "", rest)
        if kind != "worker" and "--port" not in head:
            head += f" --port {self.ports['8000']}"
        if kind in ("serve", "gateway", "tinker") and "--admin-port" not in head:
            head += f" --admin-port {self.ports['8001']}"
        if kind == "dynamo up" and "--rl-port" not in head:
            head += f" --rl-port {self.ports['8001']}"
        return head + separator + rest

    def _moved(self, text: str) -> str:
        """The text with this page's ports."""
        return PORT.sub(lambda match: self.ports[match[1]], text)

    def _python(self, block: Block) -> None:
        if self.python is None:
            self.python = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "docs" / "python_session.py")],
                cwd=self.directory, env=self.environ, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        code = STEPS.sub("for step in range(1, 2)", self._moved(block.text))
        request = {"code": code, "place": block.place, "environ": self.environ}
        pipe, answers = _pipes(self.python)
        pipe.write(json.dumps(request) + "\n")
        pipe.flush()
        line = answers.readline()
        answer = json.loads(line) if line else {"error": "Python died", "printed": ""}
        if answer["error"]:
            logs = "".join(f"\n--- {each.command}\n{each.output.read_text()[-3000:]}"
                           for each in self.servers)  # fmt: skip
            raise DocumentationError(
                f"{block.place}:\n{block.text}\n{answer['printed']}{answer['error']}{logs}"
            )


@contextmanager
def reading(directory: Path) -> Iterator[PageRunner]:
    """A reader with a home and a working directory of their own; servers end with the block."""
    home, work = directory / "home", directory / "work"
    home.mkdir()
    work.mkdir()
    ports = {str(port): str(free_port()) for port in PORTS}
    for name in LINKED:
        if (ROOT / name).exists():
            (work / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "examples", work / "examples")
    runner = PageRunner(work, ports, _environ(home, ports))
    for name, changes in SHORTER.items():
        text = (work / name).read_text()
        for long, short in changes.items():
            if long not in text:
                raise DocumentationError(f"{name} has no {long!r} to make shorter")
            text = text.replace(long, short)
        (work / name).write_text(runner._moved(text))
    try:
        yield runner
    finally:
        runner.close()


def _environ(home: Path, ports: dict[str, str]) -> dict[str, str]:
    hidden = ("LOCKSTEP_", "XDG_", "PYTEST_", "COV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    bin_dir = str(Path(sys.executable).parent)
    return kept | {
        "HOME": str(home),
        "PATH": f"{bin_dir}:{kept['PATH']}",
        "COLUMNS": "120",
        "DYN_RL_PORT": ports["8001"],
        "LOCKSTEP_LOG_LEVEL": "warning",
    }


def _check_install(command: str, place: str) -> None:
    """Extras of this package that a line of pip names must exist."""
    extras = set(metadata("lockstep-rl").get_all("Provides-Extra") or ())
    for named in re.findall(r"(?:lockstep-rl|\.)\[([\w,]+)\]", command):
        if unknown := set(named.split(",")) - extras:
            raise DocumentationError(f"{place}: {command}\nthere is no extra {sorted(unknown)}")


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise DocumentationError("the Python of a page has no pipes")
    return process.stdin, process.stdout
