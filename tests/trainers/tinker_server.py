"""A `lockstep tinker` process, and programs with the real SDK that run against it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("LOCKSTEP_TEST_TINKER") or ROOT / ".venv-tinker" / "bin" / "python")
PROGRAMS = Path(__file__).parent / "programs"
KEY = "tml-secret-of-the-tests"
TIMEOUT = 240


class TinkerProcess:
    """A server over its own state directory, which may be killed and started again."""

    def __init__(self, state: Path, *arguments: str) -> None:
        self.state = state
        self._arguments = arguments
        self._port = "0"
        self.start()

    def start(self) -> None:
        """Starts it, at the port it had before if there was one."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
        command = [sys.executable, "-m", "lockstep", "tinker", "tiny", "--json",
                   "--port", self._port, "--admin-port", "0", "--state-dir", str(self.state),
                   *self._arguments]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**clean, "LOCKSTEP_API_KEYS": KEY}
        )
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"lockstep tinker ended with code {self.process.wait()}")
        self.ready: dict[str, Any] = json.loads(line)
        self.url: str = self.ready["url"]
        self._port = self.url.rpartition(":")[2]

    def kill(self) -> None:
        """Ends it without any warning."""
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        """Ends it as an operator does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()

    def environ(self, home: Path) -> dict[str, str]:
        """The environment of a client, which holds nothing of ours."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "NO_PROXY": "127.0.0.1",
        }

    def run(self, home: Path, *command: str, says: str | None = None, **environ: str) -> str:
        """What a program with the SDK prints; the program has ended well, or has said so: now and
        then the SDK's transport aborts while the interpreter ends."""
        result = subprocess.run(
            [str(PYTHON), *command], cwd=home, env=self.environ(home) | environ,
            capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip
        ended = result.returncode == 0 or (
            says is not None and says in result.stdout + result.stderr
        )
        assert ended, f"{result.stdout[-3000:]}{result.stderr[-6000:]}"
        return result.stdout

    def program(self, home: Path, name: str, *arguments: str, **environ: str) -> Any:
        """The JSON that a program of `programs` prints last."""
        out = self.run(home, str(PROGRAMS / f"{name}.py"), *arguments, **environ)
        return json.loads(out.strip().splitlines()[-1])
