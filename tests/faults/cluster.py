"""Real worker processes behind proxies, a real gateway in front of them, and how to harm them."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from lockstep.fleet.remote import RemoteFleet
from tests.fleet.fault_injector import Injector
from tests.processes import TOKEN, WorkerProcess

WORKER = ("--max-model-len", "512", "--max-num-seqs", "16")
GATEWAY = (
    "--tokenizer", "tiny", "--wait-seconds", "4", "--drain-seconds", "2", "--health-seconds", "2",
    "--queue-seconds", "10", "--budget", "stage=8", "--budget", "pause=4", "--budget", "swap=3",
    "--budget", "commit=4", "--budget", "prove=6", "--budget", "resume=3", "--budget",
    "straggler=1.5", "--budget", "stage_straggler=1.5",
)  # fmt: skip
CLOCK = Path(__file__).parent / "clock"
"""Directory of the module that makes the wall clock of a gateway jump."""
DECADE_HOURS = 10 * 365 * 24
START_SECONDS = 120.0
ADAPTER = "lora"
"""Name of the adapter that every fleet serves."""


class Gateway:
    """A `lockstep gateway` process. Its wall clock is `hours` ahead, until `jump` sets it."""

    def __init__(
        self, workers: list[str], state: Path, ports: tuple[int, int] = (0, 0), hours: int = 0
    ) -> None:
        self.state, self.clock = state, state.with_suffix(".clock")
        self.jump(hours)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
        environ |= {"LOCKSTEP_ADMIN_TOKEN": TOKEN, "XDG_STATE_HOME": str(state.parent / "xdg")}
        environ |= {"PYTHONPATH": str(CLOCK), "FAKE_CLOCK_FILE": str(self.clock)}
        command = [sys.executable, "-m", "lockstep", "gateway", "--json", "--state-dir", str(state),
                   "--port", str(ports[0]), "--admin-port", str(ports[1]), *GATEWAY]  # fmt: skip
        for worker in workers:
            command += ["--worker", worker]
        with open(state.with_suffix(".log"), "ab") as log:
            # Through a pipe: what it says about a full disk is not to be lost in it.
            self._cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._cat.stdin, text=True, env=environ
        )
        if self._cat.stdin is not None:
            self._cat.stdin.close()
        self.url = self.admin_url = ""

    def ready(self) -> Gateway:
        """Waits for it. Raises RuntimeError when it ends before."""
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"the gateway ended with code {self.process.wait()}")
        fields = json.loads(line)
        self.url, self.admin_url = fields["url"], fields["admin_url"]
        return self

    @property
    def ports(self) -> tuple[int, int]:
        return int(self.url.rpartition(":")[2]), int(self.admin_url.rpartition(":")[2])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(10)
        self._cat.wait(10)

    def fill_disk(self, full: bool) -> None:
        """Lets it write to no file any more, or again."""
        most = 1 if full else resource.RLIM_INFINITY
        with suppress(ProcessLookupError):
            resource.prlimit(
                self.process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY)
            )

    def jump(self, hours: int) -> None:
        self.clock.write_text(str(hours))


class Cluster:
    """`count` workers and a gateway; all are whole again after `heal`."""

    def __init__(self, count: int, directory: Path, adapter: Path) -> None:
        self.count, self.directory, self.adapter = count, directory, adapter
        self.workers: list[WorkerProcess] = []
        self.injectors: list[Injector] = []
        self.stopped: set[int] = set()
        self.spoiled: list[tuple[Path, bytes]] = []
        self.others: list[Gateway] = []
        self.restarts = 0
        self.seconds = 0
        self._helpers: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Cluster:
        self.directory.mkdir(parents=True)
        self.workers = [await asyncio.to_thread(WorkerProcess, *WORKER) for _ in range(self.count)]
        for worker in self.workers:
            self.injectors.append(await Injector(worker).__aenter__())
        self.gateway = await asyncio.to_thread(self._start, self.directory / "state", (0, 0))
        async with self.fleet() as fleet:
            await fleet.load_adapter(ADAPTER, self.adapter)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._helpers:
            task.cancel()
        for gateway in (self.gateway, *self.others):
            gateway.kill()
        for index, worker in enumerate(self.workers):
            self.proceed(index)
            worker.process.kill()
            worker.process.wait(10)
        for injector in self.injectors:
            await injector.__aexit__()

    def _start(self, state: Path, ports: tuple[int, int]) -> Gateway:
        urls = [f"{each.url},{each.system_url}" for each in self.injectors]
        return Gateway(urls, state, ports).ready()

    def fleet(self) -> RemoteFleet:
        return RemoteFleet(self.gateway.admin_url, token=TOKEN, timeout=60.0)

    # Harm

    def kill(self, index: int) -> None:
        self.workers[index].process.kill()
        self.workers[index].process.wait(10)

    def stop(self, index: int) -> None:
        """SIGSTOP: it keeps its connections and says nothing."""
        self.stopped.add(index)
        with suppress(ProcessLookupError):
            self.workers[index].process.send_signal(signal.SIGSTOP)

    def proceed(self, index: int) -> None:
        self.stopped.discard(index)
        with suppress(ProcessLookupError):
            self.workers[index].process.send_signal(signal.SIGCONT)

    def spoil(self, checkpoint: Path) -> None:
        """Other weights take the place of some, in a file of the same size."""
        file = checkpoint / "model.safetensors"
        raw = file.read_bytes()
        self.spoiled.append((file, raw))
        at = len(raw) // 2 // 4 * 4
        noise = b"\x00\x00\x80\x3f" * 4096
        file.write_bytes(raw[:at] + noise + raw[at + len(noise) :])

    def second_gateway(self, checkpoint: Path, version: str) -> None:
        """Another gateway, with a state of its own, drives the same workers elsewhere."""
        task = asyncio.create_task(self._second(checkpoint, version))
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)

    async def _second(self, checkpoint: Path, version: str) -> None:
        state = self.directory / f"other-{len(self.others)}"
        urls = [f"{each.url},{each.system_url}" for each in self.injectors]
        # Every other one runs with its clock ten years ahead: its generation is higher than any
        # that the first gateway would take by itself.
        self.seconds += 1
        gateway = Gateway(urls, state, hours=DECADE_HOURS * (self.seconds % 2))
        self.others.append(gateway)
        with suppress(Exception):  # it may find nobody, or be killed; either is part of the trial
            await asyncio.to_thread(gateway.ready)
            async with RemoteFleet(gateway.admin_url, token=TOKEN, timeout=20) as fleet:
                await fleet.update_weights(checkpoint, version)

    # Whole again

    async def heal(self) -> None:
        """Ends every fault, and starts again what is dead or was superseded."""
        for injector in self.injectors:
            injector.heal()  # first, or what did not strike yet would strike now
        for gateway in self.others:
            gateway.kill()
        if self._helpers:
            await asyncio.wait(self._helpers, timeout=10)
        for file, raw in self.spoiled:
            file.write_bytes(raw)
        self.spoiled = []
        for index in range(self.count):
            self.proceed(index)
            if self.workers[index].process.poll() is not None:
                await self.restart_worker(index)
        self.gateway.fill_disk(False)
        self.gateway.jump(0)
        if self.others or not self.gateway.alive:
            await self.restart_gateway()
        for gateway in self.others:
            shutil.rmtree(gateway.state, ignore_errors=True)
        self.others = []

    async def restart_worker(self, index: int) -> None:
        """The same ports, another process."""
        old = self.workers[index]
        ports = [url.rpartition(":")[2] for url in (old.url, old.system_url)]
        self.workers[index] = await asyncio.to_thread(
            WorkerProcess, *WORKER, "--port", ports[0], "--system-port", ports[1]
        )
        self.injectors[index].worker = self.workers[index]

    async def restart_gateway(self) -> None:
        """Kills it, and starts it anew on its ports and its state."""
        self.gateway.kill()
        self.restarts += 1
        ports, state = self.gateway.ports, self.gateway.state
        deadline = monotonic() + START_SECONDS
        while True:
            try:
                self.gateway = await asyncio.to_thread(self._start, state, ports)
            except RuntimeError:
                if monotonic() > deadline:
                    output = state.with_suffix(".log").read_text(errors="replace")[-4000:]
                    raise RuntimeError(f"the gateway does not start any more:\n{output}") from None
                await asyncio.sleep(0.5)
            else:
                return
