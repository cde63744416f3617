"""A real PostgreSQL for tests: its own directory, a port of its own, ended with the test."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PLACES = (
    *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
    *sorted((ROOT / ".venv-scale/postgresql/usr/lib/postgresql").glob("*/bin"), reverse=True),
)
FAST = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=200")


class PostgresServer:
    """A server on 127.0.0.1 that can be stopped, killed and started again on the same port."""

    def __init__(self, directory: Path, port: int, settings: tuple[str, ...]) -> None:
        self.directory, self.port, self._settings = directory, port, settings
        self._made = 0

    @property
    def url(self) -> str:
        return f"postgresql://lockstep@127.0.0.1:{self.port}/postgres"

    @property
    def environment(self) -> dict[str, str]:
        """Without PG* variables of the machine, which would change what a URL means."""
        return {name: value for name, value in os.environ.items() if not name.startswith("PG")}

    def schema_url(self) -> str:
        """The URL of a schema that nobody used yet."""
        self._made += 1
        return f"{self.url}?schema=test_{self._made}"

    def start(self) -> None:
        options = [
            f"-p {self.port}",
            "-c listen_addresses=127.0.0.1",
            f"-c unix_socket_directories={self.directory}",
            *(f"-c {each}" for each in self._settings),
        ]
        self._control("-w", "-l", str(self.directory / "log"), "-o", " ".join(options), "start")

    def stop(self, mode: str = "fast") -> None:
        """Ends the server; mode "immediate" is a crash."""
        self._control("-w", "-m", mode, "stop")

    def _control(self, *arguments: str) -> None:
        _run(_binary("pg_ctl"), "-D", str(self.directory / "data"), *arguments)

    async def execute(self, *statements: str) -> list[asyncpg.Record]:
        """Runs statements as the owner; what the last one returned."""
        connection = await asyncpg.connect(self.url)
        try:
            rows: list[asyncpg.Record] = []
            for statement in statements:
                rows = await connection.fetch(statement)
            return rows
        finally:
            await connection.close()


@contextmanager
def postgres_server(*settings: str) -> Iterator[PostgresServer]:
    """A new server, with `settings` as name=value beside the fast ones."""
    directory = Path(tempfile.mkdtemp(prefix="lockstep-postgres-", dir="/tmp"))
    try:
        if os.geteuid() == 0:
            owner = pwd.getpwnam(_user())
            os.chown(directory, owner.pw_uid, owner.pw_gid)
        _run(
            _binary("initdb"), "-D", str(directory / "data"), "-A", "trust", "-U", "lockstep",
            "--no-sync", "-E", "UTF8", "--locale", "C",
        )  # fmt: skip
        server = PostgresServer(directory, free_port(), (*FAST, *settings))
        server.start()
        try:
            yield server
        finally:
            if (directory / "data" / "postmaster.pid").exists():
                server.stop("immediate")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _binary(name: str) -> str:
    for place in PLACES:
        if (place / name).is_file():
            return str(place / name)
    raise FileNotFoundError(f"no {name} of PostgreSQL: run scripts/install-scale.sh")


def _user() -> str:
    """PostgreSQL refuses to run as root."""
    known = {each.pw_name for each in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


def _run(*command: str) -> None:
    prefix: list[str] = []
    if os.geteuid() == 0:
        user = pwd.getpwnam(_user())
        prefix = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    unpacked = Path(command[0]).parents[4] / "lib/x86_64-linux-gnu"
    done = subprocess.run(
        [*prefix, *command],
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LD_LIBRARY_PATH": str(unpacked)},
        cwd="/tmp",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout.decode()}")
