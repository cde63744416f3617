"""Real SGLang servers for tests: one of its own, or one behind `lockstep serve`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lockstep.backends.admin import Source
from lockstep.backends.registry import open_admin
from lockstep.backends.sglang.admin import SglangAdmin
from lockstep.backends.sglang.transport import SglangTransport
from lockstep.checkpoint.probe import compare
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool
from lockstep.http.client.client import HttpClient
from lockstep.http.server.server import listen, url_of
from lockstep.launch.sglang import SglangServer
from lockstep.models import bundled
from tests.engines import vllm_models as models
from tests.processes import ServeProcess

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang/bin/python"
OPTIONS = (
    "--context-length", "4096", "--enable-lora", "--max-lora-rank", "8",
    "--lora-target-modules", "q_proj", "v_proj", "down_proj",
)  # fmt: skip
START_SECONDS = 240.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def serve_sglang(model: str, *options: str) -> ServeProcess:
    """A gateway with one SGLang server that it has started."""
    return ServeProcess(
        "--engine", "sglang", "--sessions", "memory", "--", *OPTIONS, *options,
        model=model, LOCKSTEP_SGLANG_PYTHON=str(PYTHON), **ENVIRONMENT,
    )  # fmt: skip


@dataclass(frozen=True)
class Sglang:
    """A server that was started with checkpoint `a`; `b` is another of the same shape."""

    server: SglangServer
    url: str
    a: Path
    b: Path

    @classmethod
    def start(cls, folder: Path) -> Sglang:
        source = bundled("tiny")
        assert source is not None
        a = models.random(source, folder / "a", seed=41)
        b = models.random(a, folder / "b", seed=42)
        for path in (a, b):
            models.probe(path).write(path / "probe.safetensors")
        with listen("127.0.0.1", 0) as sock:
            url = url_of(sock)
        with (folder / "log.txt").open("w") as log:
            server = SglangServer(
                str(PYTHON), str(a), url.rpartition(":")[2], OPTIONS,
                environ={**os.environ, **ENVIRONMENT}, log=log,
            )  # fmt: skip
        if not server.wait_healthy(START_SECONDS):
            code = server.stop()
            log_tail = (folder / "log.txt").read_text()[-4000:]
            pytest.fail(f"SGLang ended (code {code}) or needs over {START_SECONDS:g} s: {log_tail}")
        return cls(server, url, a, b)

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[SglangAdmin]:
        admin = await open_admin(self.url)
        assert isinstance(admin, SglangAdmin)
        try:
            yield admin
        finally:
            await admin.close()

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[SglangTransport]:
        transport = SglangTransport(HttpClient(self.url))
        try:
            yield transport
        finally:
            await transport.close()

    @asynccontextmanager
    async def fleet(self, **options: Any) -> AsyncIterator[Fleet]:
        """A fleet over the server, in this process."""
        async with Pool(probe_seconds=0.5) as pool, Fleet(pool, **options) as fleet:
            await fleet.add(self.url, await open_admin(self.url), worker_id="w0")
            await pool.wait_ready(1, 60)
            yield fleet

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """A bare request, as a client without Lockstep sends it."""
        async with aiohttp.ClientSession() as session:
            async with session.post(self.url + path, json=body) as response:
                return response.status, await response.json(content_type=None)


async def updated(admin: SglangAdmin, path: Path, version: str) -> float:
    """Bring the server to a checkpoint; return the largest distance to its trainer's logprobs."""
    await admin.stage(Source(directory=path), version)
    await admin.pause("keep")
    await admin.commit(version)
    await admin.resume()
    return await probe_off(admin, path)


async def probe_off(admin: SglangAdmin, path: Path) -> float:
    probe = models.Probe.read(path / "probe.safetensors")
    return compare(probe.logprobs, await admin.probe(probe.sequences), 0.0).max_difference
