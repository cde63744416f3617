"""Authentication of a worker's data port, equal to a gateway's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from lockstep.engine import Engine, EngineOptions
from lockstep.http.exposure import hosts_of
from lockstep.http.server.server import listen, serving, url_of
from lockstep.models import bundled
from lockstep.worker.data import DataPlane

KEY = "a-worker-key"
GENERATE = "/inference/v1/generate"
BODY = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1}}


@asynccontextmanager
async def data_port(host: str, keys: tuple[str, ...] = ()) -> AsyncIterator[aiohttp.ClientSession]:
    root = bundled("tiny")
    assert root is not None
    async with Engine("tiny", EngineOptions(max_seqs=4, prefix_cache_bytes=8 << 20)) as engine:
        plane = DataPlane(engine, "tiny", root, keys=keys, hosts=hosts_of(host))
        with listen("127.0.0.1", 0) as sock:
            async with serving([(plane.app, sock)]):
                async with aiohttp.ClientSession(url_of(sock)) as http:
                    yield http


async def status(http: aiohttp.ClientSession, **headers: str) -> int:
    async with http.post(GENERATE, json=BODY, headers=headers) as response:
        return response.status


@pytest.mark.failure_mode("F42")
async def test_a_worker_with_keys_rejects_requests_without_one() -> None:
    async with data_port("0.0.0.0", (KEY,)) as http:
        assert await status(http) == 401
        assert await status(http, authorization="Bearer another-key") == 401
        assert await status(http, authorization=f"Bearer {KEY}") == 200
        async with http.get("/health") as response:
            assert response.status == 200
        async with http.get("/metrics") as response:
            assert response.status == 401


@pytest.mark.failure_mode("F42")
async def test_a_worker_on_loopback_accepts_only_loopback_host_names() -> None:
    async with data_port("127.0.0.1") as http:
        assert await status(http, host="evil.example") == 403
        assert await status(http, host="localhost:1234") == 200


@pytest.mark.failure_mode("F42")
def test_a_worker_that_would_be_open_to_everyone_does_not_start() -> None:
    command = [sys.executable, "-m", "lockstep", "worker", "tiny", "--host", "0.0.0.0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "LOCKSTEP_API_KEYS" in ended.stderr
    assert "--insecure" in ended.stderr
    assert "Traceback" not in ended.stderr
