"""Real processes for tests, and how to talk to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp

TOKEN = "test-admin-token"
GENERATE = "/inference/v1/generate"


@contextmanager
def ready_process(*arguments: str, token: str = TOKEN, **environ: str) -> Iterator[dict[str, Any]]:
    """The ready line of a lockstep command, which is ended with the block."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**clean, "LOCKSTEP_ADMIN_TOKEN": token, **environ},
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        assert line, f"it ended with code {process.wait()}"
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait(60)


class WorkerProcess:
    """A `lockstep worker` process and how to talk to it."""

    def __init__(self, *arguments: str, model: str = "tiny", token: str | None = TOKEN) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
        if token is not None:
            environ["LOCKSTEP_ADMIN_TOKEN"] = token
        command = [sys.executable, "-m", "lockstep", "worker", model, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"the worker ended with code {self.process.wait()}")
        self.ready: dict[str, Any] = json.loads(line)
        self.url: str = self.ready["url"]
        self.system_url: str = self.ready["system_url"]
        self.token = token

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        raw = body if isinstance(body, (bytes, str)) else json.dumps(body)
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        async with aiohttp.ClientSession() as session:
            async with session.post(self.url + path, data=raw, headers=headers) as answer:
                return answer.status, await answer.json(content_type=None)

    async def get(self, path: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            return answer.status, await answer.json()

    async def generate(self, ids: list[int], **params: Any) -> tuple[int, Any]:
        top = {key: params.pop(key) for key in list(params) if key in TOP}
        return await self.post(GENERATE, {"token_ids": ids, "sampling_params": params, **top})

    async def events(self, ids: list[int], **params: Any) -> list[Any]:
        """The decoded events of a streamed answer, [DONE] left out."""
        top = {key: params.pop(key) for key in list(params) if key in TOP}
        body = {"token_ids": ids, "stream": True, "sampling_params": params, **top}
        async with aiohttp.ClientSession() as session:
            async with session.post(self.url + GENERATE, json=body) as answer:
                assert answer.status == 200, await answer.text()
                lines = [line async for line in answer.content if line.startswith(b"data: ")]
        assert lines[-1].strip() == b"data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    async def control(
        self, method: str, *, token: str | None = None, verb: str = "POST", **body: Any
    ) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {token or self.token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            url = f"{self.system_url}/engine/{method}"
            async with session.request(verb, url, json=body) as answer:
                return answer.status, await answer.json()


TOP = ("model", "request_id", "cache_salt", "priority", "return_token_ids", "stream_options",
       "return_routed_experts", "routed_experts_format", "return_sampling_mask",
       "sampling_mask_format", "weight_version",
       "min_weight_version")  # fmt: skip


class ServeProcess:
    """A `lockstep serve` process: workers, gateway and control plane."""

    def __init__(self, *arguments: str, model: str = "tiny", **environ: str) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
        command = [sys.executable, "-m", "lockstep", "serve", model, "--json", "--port", "0",
                   "--admin-port", "0", *arguments]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True,
            env={**clean, "LOCKSTEP_ADMIN_TOKEN": TOKEN, **environ},
        )  # fmt: skip
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"lockstep serve ended with code {self.process.wait()}")
        self.ready: dict[str, Any] = json.loads(line)
        self.url: str = self.ready["url"]
        self.admin_url: str = self.ready["admin_url"]
        self.workers: list[dict[str, Any]] = self.ready["workers"]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
