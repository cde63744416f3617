"""`lockstep serve` on a store, started again: it resumes its fleet, whatever ended it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lockstep.engine.probe import write_probe
from lockstep.models import bundled
from tests.engine.checkpoints import trainer, variant
from tests.processes import TOKEN, WorkerProcess
from tests.scale.replicas import HEADERS, ReplicaProcess

START_SECONDS = 240


@contextmanager
def serve(store: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """`lockstep serve tiny` on the store: its ready line, and its process as "process"."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "PG"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "serve", "tiny", "--json", "--port", "0",
         "--admin-port", "0", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**clean, "LOCKSTEP_ADMIN_TOKEN": TOKEN, "LOCKSTEP_STORE": store},
    )  # fmt: skip
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    late = threading.Timer(START_SECONDS, process.kill)
    late.start()
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            code = process.wait()
            reader.join(10)
            raise RuntimeError(f"serve ended with code {code}: {''.join(log)}")
        yield {**json.loads(line), "process": process}
    finally:
        late.cancel()
        process.terminate()
        process.wait(60)


def end(served: dict[str, Any], number: int) -> None:
    served["process"].send_signal(number)
    served["process"].wait(60)


async def call(served: dict[str, Any], method: str, route: str, body: Any = None) -> Any:
    async with aiohttp.ClientSession(headers=HEADERS) as http:
        async with http.request(method, f"{served['admin_url']}/v1/rl/{route}", json=body) as reply:
            result = await reply.json(content_type=None)
            assert reply.status < 300, result
            return result


async def workers(served: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
    """State and version of each worker, by id."""
    state = await call(served, "GET", "state")
    return {worker["id"]: (worker["state"], worker["version"]) for worker in state["workers"]}


async def wait_for(served: dict[str, Any], expected: dict[str, tuple[str, str | None]]) -> None:
    found: Any = None
    try:
        async with asyncio.timeout(60):
            while (found := await workers(served)) != expected:
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"expected {expected}, but the workers are {found}")


@asynccontextmanager
async def other_worker() -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess()
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = variant(bundled("tiny") or Path(), tmp_path_factory.mktemp("w") / "step-1", seed=1)
    write_probe(trainer(path), path, version="step-1")
    return path


async def test_a_restart_replaces_its_own_workers_and_proves_the_others(
    store_url: str, weights: Path
) -> None:
    async with other_worker() as other:
        with serve(store_url) as first:
            body = {"url": other.url, "admin_url": other.system_url, "id": "other"}
            await call(first, "POST", "workers", {**body, "admin_token": TOKEN})
            await call(first, "POST", "update_weights", {"weight_dir": str(weights)})
            expected = dict.fromkeys(("w0", "other"), ("serving", "step-1"))
            await wait_for(first, expected)
            end(first, signal.SIGTERM)
            assert first["process"].returncode == 0
        with serve(store_url) as second:
            assert second["resumed"] == "step-1"
            await wait_for(second, expected)
            end(second, signal.SIGKILL)
        with serve(store_url) as third:
            await wait_for(third, expected)
            end(third, signal.SIGKILL)
        with serve(store_url, "--fresh") as fresh:
            assert fresh["resumed"] is None
            await wait_for(fresh, {"w0": ("serving", "default")})


async def test_a_gateway_that_stayed_takes_the_restarted_worker_and_forbids_fresh(
    store_url: str,
) -> None:
    stayed: ReplicaProcess | None = None
    try:
        with serve(store_url) as first:
            stayed = ReplicaProcess(store=store_url)
            assert stayed.ready
            end(first, signal.SIGKILL)
        with serve(store_url) as second:
            await wait_for(second, {"w0": ("serving", "default")})
            url = second["workers"][0]["url"]
            async with asyncio.timeout(60):
                while True:
                    [worker] = (await stayed.state())["workers"]
                    if (worker["url"], worker["state"]) == (url, "serving"):
                        break
                    await asyncio.sleep(0.1)
            end(second, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="which other gateways use") as caught:
            with serve(store_url, "--fresh"):
                pass
        assert stayed.admin_url in str(caught.value)
    finally:
        if stayed is not None:
            stayed.kill(signal.SIGTERM)
