"""Real vLLM servers for tests: at most one at a time, started when a test first asks for it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp
import pytest

from lockstep.backends.admin import Source
from lockstep.backends.vllm.admin import VllmAdmin
from lockstep.backends.vllm.transport import VllmTransport
from lockstep.checkpoint.probe import Probe, compare
from lockstep.http.client.client import HttpClient
from lockstep.http.server.server import listen, url_of
from lockstep.launch.vllm import VllmServer
from lockstep.models import bundled
from tests.engines import vllm_models as models

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm/bin/python"
START_SECONDS = 240.0
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: the system call by which a process asks for AMX tiles."""
LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "k_proj",
        "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # fmt: skip
"""Not lm_head: with it, vLLM dies of prompt logprobs in a batch with other requests."""
OPTIONS = ("--max-model-len", "1024", "--max-num-seqs", "16")
DTYPES = {"dense": "float32", "dense-bf16": "bfloat16", "moe": "float32"}
"""The type in which each kind of server computes."""


@dataclass(frozen=True)
class Vllm:
    """A server of checkpoint `a`; `b` is another of the same shape."""

    url: str
    a: Path
    b: Path
    folder: Path
    """For what a test writes."""
    probes: dict[Path, Probe]
    """What the trainer's model says, by checkpoint."""
    dtype: str

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[VllmAdmin]:
        admin = VllmAdmin(self.url)
        try:
            await admin.detect()
            yield admin
        finally:
            await admin.close()

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[VllmTransport]:
        transport = VllmTransport(HttpClient(self.url))
        try:
            yield transport
        finally:
            await transport.close()

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """A bare request, as somebody without Lockstep would send it."""
        async with aiohttp.ClientSession() as session:
            async with session.post(self.url + path, json=body) as response:
                return response.status, await response.json(content_type=None)

    @asynccontextmanager
    async def slowed(self, seconds: float) -> AsyncIterator[None]:
        """Every step of the model takes so much longer while the block runs."""
        await self.rpc("slow_steps", seconds=seconds)
        try:
            yield
        finally:
            await self.rpc("slow_steps", seconds=0.0)

    async def rpc(self, method: str, **kwargs: Any) -> Any:
        status, body = await self.post("/collective_rpc", {"method": method, "kwargs": kwargs})
        assert status == 200, body
        return body["results"][0]


async def updated(server: Vllm, admin: VllmAdmin, path: Path, version: str) -> float:
    """Brings the server to a checkpoint; how far it is off that one's probe then, still paused."""
    await admin.stage(Source(directory=path), version)
    await admin.pause("keep")
    await admin.commit(version)
    off = await probe_off(server, admin, path)
    await admin.resume()
    return off


async def probe_off(server: Vllm, admin: VllmAdmin, path: Path) -> float:
    probe = server.probes[path]
    scores = await admin.probe(probe.sequences)
    return compare(probe.logprobs, scores, 0.0).max_difference


class Slot:
    """Holds one running server. Asked for another kind, it stops the one before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kind = ""
        self._server: VllmServer | None = None
        self._vllm: Vllm | None = None

    def use(self, kind: str) -> Vllm:
        if kind == self._kind and self._vllm is not None:
            return self._vllm
        self.stop()
        if not PYTHON.exists():
            pytest.skip(f"{PYTHON} is not there: run scripts/install-vllm.sh")
        if kind == "dense-bf16" and forbids_amx():
            pytest.skip(
                "vLLM crashes in bfloat16: this CPU lists AMX, and its hypervisor forbids it"
            )
        self._kind, folder = kind, Path(mkdtemp(prefix=kind, dir=self._folder))
        first = models.random(_source(kind, folder), folder / "a", seed=1)
        second = models.random(first, folder / "b", seed=2)
        probes = {path: models.probe(path) for path in (first, second)}
        with listen("127.0.0.1", 0) as sock:
            url = url_of(sock)
        options = (
            *OPTIONS, "--dtype", DTYPES[kind], "--served-model-name", "model",
            "--worker-extension-cls", "tests.engines.vllm_faults.FaultyWorker",
            *(LORA if kind != "moe" else ()),
        )  # fmt: skip
        # `src` first: an environment shared by several working trees has one of them installed.
        environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        port = url.rpartition(":")[2]
        with (folder / "log.txt").open("w") as log:
            self._server = VllmServer(
                str(PYTHON), str(first), port, options, environ=environ, log=log
            )
        if not self._server.wait_healthy(START_SECONDS):
            code = self._server.stop()
            log_tail = (folder / "log.txt").read_text()[-4000:]
            pytest.fail(f"vLLM ended (code {code}) or needs over {START_SECONDS:g} s: {log_tail}")
        self._vllm = Vllm(url, first, second, folder, probes, DTYPES[kind])
        return self._vllm

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server, self._vllm, self._kind = None, None, ""


def _source(kind: str, folder: Path) -> Path:
    """Where names and shapes come from: a model with tied embeddings, or experts and a head."""
    source = bundled("tiny-moe" if kind == "moe" else "tiny")
    assert source is not None
    return models.untied(source, folder / "source", seed=3) if kind == "moe" else source


def forbids_amx() -> bool:
    """Whether this CPU lists AMX tiles but a process may not use them."""
    path = Path("/proc/cpuinfo")
    if not path.exists() or "amx_tile" not in path.read_text():
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) != 0
