"""A real Dynamo deployment for the tests of one module: frontend and workers, on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.backends.dynamo.admin import DynamoAdmin
from lockstep.backends.dynamo.discovery import DiscoveredWorker, DynamoDiscovery

PYTHON = Path(__file__).parents[2] / ".venv-dynamo/bin/python"
START_SECONDS = 240

needs_dynamo = pytest.mark.skipif(
    not PYTHON.exists(), reason="no .venv-dynamo here: run scripts/install-dynamo.sh"
)


class Deployment:
    """`lockstep dynamo up`, as a process of its own."""

    def __init__(self, model: str, workers: int, *worker_args: str) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "DYN_"))}
        command = [
            sys.executable, "-m", "lockstep", "dynamo", "up", model, "--workers", str(workers),
            "--port", "0", "--rl-port", "0", "--json", "--python", str(PYTHON),
            "--worker-args", " ".join(worker_args),
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        late = threading.Timer(START_SECONDS, self.process.kill)
        late.start()
        line = self.process.stdout.readline() if self.process.stdout else ""
        late.cancel()
        if not line:
            raise RuntimeError(f"lockstep dynamo up ended with code {self.process.wait()}")
        ready: dict[str, Any] = json.loads(line)
        self.url: str = ready["url"]
        self.rl_url: str = ready["rl_url"]
        self.pid: int = ready["pid"]
        self.workers: list[dict[str, Any]] = ready["workers"]

    def discovery(self) -> DynamoDiscovery:
        return DynamoDiscovery(self.url, self.rl_url)

    async def discovered(self) -> list[DiscoveredWorker]:
        """Its workers, in the order in which they were started."""
        discovery = self.discovery()
        try:
            by_id = {one.id: one for one in await discovery.find()}
        finally:
            await discovery.close()
        return [by_id[one["instance_id"]] for one in self.workers if one["instance_id"] in by_id]

    async def admin(self, index: int = 0) -> DynamoAdmin:
        worker = (await self.discovered())[index]
        assert worker.ready, worker.error
        assert worker.admin_url is not None
        return DynamoAdmin(worker.admin_url, worker.routes)

    def kill(self, index: int) -> None:
        os.kill(self.workers[index]["pid"], signal.SIGKILL)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()


@contextmanager
def deployed(model: str = "tiny", workers: int = 1, *worker_args: str) -> Iterator[Deployment]:
    deployment = Deployment(model, workers, "--drain-seconds", "2", *worker_args)
    try:
        yield deployment
    finally:
        assert deployment.stop() == 0
