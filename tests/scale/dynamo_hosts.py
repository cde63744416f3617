"""A Dynamo deployment on two hosts: a frontend and a gateway here, workers there, etcd between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lockstep.fleet.remote import RemoteFleet
from tests.scale.etcd_server import BIN, EtcdServer, NatsServer
from tests.scale.two_hosts import Host, Hosts

PYTHON = Path(__file__).parents[2] / ".venv-dynamo/bin/python"
TOKEN = "test-admin-token"
START_SECONDS = 150.0
STOP_SECONDS = 40.0
SAMPLING = {"max_tokens": 8, "seed": 5, "ignore_eos": True, "logprobs": 0}
REQUEST = {"model": "tiny", "token_ids": [10, 20, 30, 40], "sampling_params": SAMPLING}

needs_servers = pytest.mark.skipif(
    not (PYTHON.exists() and (BIN / "etcd").exists()),
    reason="run scripts/install-dynamo.sh and scripts/install-scale.sh first",
)


class Started:
    """A `lockstep` command on a host; `ready` is the line it announced itself with."""

    def __init__(self, host: Host, log: Path, *arguments: str, **environ: str) -> None:
        clean = ("LOCKSTEP_", "DYN_", "ETCD_", "NATS_")
        base = {k: v for k, v in os.environ.items() if not k.startswith(clean)}
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*host.prefix, sys.executable, "-m", "lockstep", *arguments],
                stdout=subprocess.PIPE, stderr=errors, text=True, env={**base, **environ},
            )  # fmt: skip
        self.ready: dict[str, Any] = {}

    def until_ready(self) -> Started:
        late = threading.Timer(START_SECONDS, self.process.kill)
        late.start()
        line = self.process.stdout.readline() if self.process.stdout else ""
        late.cancel()
        if not line:
            raise RuntimeError(f"code {self.process.wait()}: {self.output[-3000:]}")
        self.ready = json.loads(line)
        return self

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        finally:
            self.process.kill()


class DynamoHosts:
    """The deployment. What it starts ends with it.

    With a `password`, requests go through NATS, and both it and etcd demand the password.
    """

    def __init__(
        self, hosts: Hosts, directory: Path, stack: ExitStack, password: str | None = None
    ) -> None:
        self.hosts, self.directory, self._stack = hosts, directory, stack
        self.etcd = EtcdServer(directory / "etcd", hosts.here.address)
        self.nats = None
        self.environ: dict[str, str] = {}
        self._start(self.etcd)
        if password is not None:
            self.nats = NatsServer(directory / "nats", hosts.here.address, password)
            self._start(self.nats)
            self.etcd.lock(password)
            self.environ = {
                "ETCD_AUTH_USERNAME": "root", "ETCD_AUTH_PASSWORD": password,
                "NATS_AUTH_USERNAME": "lockstep", "NATS_AUTH_PASSWORD": password,
            }  # fmt: skip
        self._started = 0

    def _start(self, server: EtcdServer | NatsServer) -> None:
        server.start()
        self._stack.callback(server.kill)

    @property
    def network(self) -> tuple[str, ...]:
        plane = () if self.nats is None else ("--request-plane", self.nats.url)
        return ("--discovery", self.etcd.url, *plane)

    def start(self, host: Host, *arguments: str, **environ: str) -> Started:
        self._started += 1
        log = self.directory / f"{self._started}.log"
        started = Started(host, log, *arguments, **self.environ, **environ)
        self._stack.callback(started.stop)
        return started

    def frontend(self) -> Started:
        here = self.hosts.here
        return self.start(
            here, "dynamo", "up", "tiny", "--workers", "0", "--port", "0", "--rl-port", "0",
            "--json", "--python", str(PYTHON), *self.network, "--advertise", here.address,
        )  # fmt: skip

    def workers(self, count: int) -> Started:
        there = self.hosts.there
        return self.start(
            there, "dynamo", "up", "tiny", "--workers", str(count), "--no-frontend", "--json",
            "--python", str(PYTHON), "--worker-args", "--drain-seconds 2 --arithmetic exact",
            *self.network, "--advertise", there.address,
        )  # fmt: skip

    def gateway(self, frontend: Started) -> Started:
        return self.start(
            self.hosts.here, "gateway", "--dynamo", frontend.ready["url"], "--port", "0",
            "--admin-port", "0", "--tokenizer", "tiny", "--sessions", "memory",
            "--json", DYN_RL_PORT=frontend.ready["rl_url"].rpartition(":")[2],
            LOCKSTEP_ADMIN_TOKEN=TOKEN,
        )  # fmt: skip


@contextmanager
def dynamo_hosts(
    hosts: Hosts, directory: Path, password: str | None = None
) -> Iterator[DynamoHosts]:
    with ExitStack() as stack:
        yield DynamoHosts(hosts, directory, stack, password)


class Load:
    """Requests to a gateway, one after the other from each of three callers, and how they fared."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.statuses: Counter[int] = Counter()
        self.last: dict[str, Any] = {}

    async def caller(self, http: aiohttp.ClientSession) -> None:
        while True:
            self.statuses[await self.request(http)] += 1
            await asyncio.sleep(0.15)

    async def request(self, http: aiohttp.ClientSession) -> int:
        async with http.post(f"{self._url}/inference/v1/generate", json=REQUEST) as got:
            if got.status == 200:
                self.last = await got.json()
            return got.status


@asynccontextmanager
async def load(url: str) -> AsyncIterator[Load]:
    """Load while the block runs."""
    callers = Load(url)
    async with aiohttp.ClientSession() as http:
        tasks = [asyncio.create_task(callers.caller(http)) for _ in range(3)]
        try:
            yield callers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


class Watched:
    """What a gateway says of its fleet."""

    def __init__(self, gateway: Started) -> None:
        self.fleet = RemoteFleet(gateway.ready["admin_url"], token=TOKEN)

    async def serving(self) -> dict[str, str]:
        """The version of each worker that serves."""
        state = await self.fleet.state()
        return {one["id"]: one["version"] for one in state["workers"] if one["state"] == "serving"}

    async def version(self) -> str:
        """What the fleet is to serve."""
        return str((await self.fleet.state())["version"])

    async def refused(self) -> dict[str, str]:
        return {one["id"]: one["reason"] for one in (await self.fleet.state())["refused"]}

    async def until_serving(self, count: int, *but: str, seconds: float = 90.0) -> float:
        """Seconds until exactly `count` workers serve, none of them among `but`."""
        begun = time.monotonic()
        names: dict[str, str] = {}
        try:
            async with asyncio.timeout(seconds):
                while len(names := await self.serving()) != count or set(but) & set(names):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(
                f"{count} were to serve within {seconds} s: {await self.fleet.state()}"
            ) from None
        return time.monotonic() - begun
