"""Several real gateways on one real PostgreSQL, in front of real workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import aiohttp

from tests.processes import TOKEN, WorkerProcess

HEADERS = {"authorization": f"Bearer {TOKEN}"}


class ReplicaProcess:
    """A `lockstep gateway` process. It may be killed and stopped; others go on."""

    def __init__(self, *arguments: str, store: str | None = None, **environ: str) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "PG"))}
        shared = () if store is None else ("--store", store)
        command = [sys.executable, "-m", "lockstep", "gateway", "--json", "--port", "0",
                   "--admin-port", "0", "--tokenizer", "tiny", *shared, *arguments]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**clean, "LOCKSTEP_ADMIN_TOKEN": TOKEN, "LOCKSTEP_LOG_LEVEL": "info", **environ},
        )  # fmt: skip
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ready: dict[str, Any] | None = None

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)

    @property
    def ready(self) -> dict[str, Any]:
        """What it printed when it was ready; waits for that."""
        if self._ready is None:
            line = self.process.stdout.readline() if self.process.stdout else ""
            if not line:
                code = self.process.wait()
                raise RuntimeError(f"the gateway ended with code {code}: {''.join(self.log)}")
            self._ready = json.loads(line)
        return self._ready

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def admin_url(self) -> str:
        return str(self.ready["admin_url"])

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(60)

    async def state(self) -> dict[str, Any]:
        status, body = await self.admin("GET", "state")
        assert status == 200, body
        return body

    async def admin(self, method: str, route: str, body: Any = None, **headers: str) -> Any:
        """Status and body of a call of the control plane; 0 when it cannot be reached."""
        url = f"{self.admin_url}/v1/rl/{route}"
        try:
            async with aiohttp.ClientSession(headers={**HEADERS, **headers}) as session:
                async with session.request(method, url, json=body) as answer:
                    return answer.status, await answer.json(content_type=None)
        except aiohttp.ClientError as error:
            return 0, {"error": {"message": repr(error)}}

    async def update(self, path: object, version: str, **headers: str) -> Any:
        body = {"weight_dir": str(path), "version": version}
        return await self.admin("POST", "update_weights", body, **headers)

    async def generate(self, ids: Sequence[int], **more: Any) -> tuple[int, Any]:
        """Status and body of a request for tokens; 0 when the gateway cannot be reached."""
        sampling = {"max_tokens": 8, "logprobs": 0, "temperature": 1.0, **more.pop("sampling", {})}
        body = {"token_ids": list(ids), "sampling_params": sampling, **more}
        try:
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{self.url}/inference/v1/generate", json=body) as answer:
                    return answer.status, await answer.json(content_type=None)
        except aiohttp.ClientError as error:
            return 0, {"error": {"message": repr(error)}}


def worker_arguments(workers: Sequence[WorkerProcess]) -> list[str]:
    """The options of a gateway that name these workers, with their admin ports."""
    return [part for one in workers for part in ("--worker", f"{one.url},{one.system_url}")]


async def leader_of(gateways: Sequence[ReplicaProcess]) -> ReplicaProcess | None:
    """The one that says it leads, among those that live."""
    for gateway in gateways:
        if gateway.alive:
            status, state = await gateway.admin("GET", "state")
            if status == 200 and state["role"] == "leader":
                return gateway
    return None
