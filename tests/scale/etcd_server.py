"""A real etcd and a real NATS for tests, with directories and ports of their own."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.ports import free_port

BIN = Path(__file__).parents[2] / ".venv-scale/bin"
START_SECONDS = 30.0


class _Server:
    """A process that can be killed and started again on the same port, with the data it had."""

    def __init__(self, directory: Path, address: str) -> None:
        self.directory, self.address, self.port = directory, address, free_port(address)
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def responds(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Returns when it serves."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, env={"HOME": str(self.directory)}
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.responds():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.directory / "log").read_text()[-2000:])
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill -9: it says goodbye to nobody."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class EtcdServer(_Server):
    """One etcd, without a cluster."""

    def __init__(self, directory: Path, address: str) -> None:
        super().__init__(directory, address)
        self._peer_port = free_port()

    @property
    def url(self) -> str:
        return f"etcd://{self.address}:{self.port}"

    def command(self) -> list[str]:
        client = f"http://{self.address}:{self.port}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        return [
            str(BIN / "etcd"), "--name", "e1", "--data-dir", str(self.directory / "data"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"e1={peer}", "--log-level", "warn",
        ]  # fmt: skip

    def lock(self, password: str) -> None:
        """From now on only user root, with this password, may read or write."""
        for words in (["user", "add", f"root:{password}"], ["auth", "enable"]):
            subprocess.run(
                [str(BIN / "etcdctl"), "--endpoints", f"{self.address}:{self.port}", *words],
                check=True, capture_output=True,
            )  # fmt: skip

    def responds(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://{self.address}:{self.port}/health", timeout=2
            ) as got:
                return b'"true"' in got.read()
        except (urllib.error.URLError, OSError):
            return False


class NatsServer(_Server):
    """One NATS server; with a `password`, it lets only user `lockstep` in."""

    def __init__(self, directory: Path, address: str, password: str | None = None) -> None:
        super().__init__(directory, address)
        self._password = password

    @property
    def url(self) -> str:
        return f"nats://{self.address}:{self.port}"

    def command(self) -> list[str]:
        known = [] if self._password is None else ["--user", "lockstep", "--pass", self._password]
        return [str(BIN / "nats-server"), "-a", self.address, "-p", str(self.port), *known]

    def responds(self) -> bool:
        try:
            with socket.create_connection((self.address, self.port), timeout=2) as sock:
                return sock.recv(5) == b"INFO "
        except OSError:
            return False
