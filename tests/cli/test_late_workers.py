"""A gateway starts before its workers, or while one is away: they join when they respond."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from tests.ports import free_port
from tests.processes import TOKEN, ready_process

HEADERS = {"authorization": f"Bearer {TOKEN}"}
GATEWAY = ("gateway", "--json", "--tokenizer", "tiny", "--port", "0", "--admin-port", "0",
           "--state-dir", "memory")  # fmt: skip


def worker_arguments(tmp_path: Path, port: int, system_port: int) -> tuple[str, ...]:
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"say": "hello"}) + "\n")
    return ("worker", "--script", str(script), "--port", str(port),
            "--system-port", str(system_port))  # fmt: skip


def option(port: int, system_port: int) -> tuple[str, str]:
    return "--worker", f"http://127.0.0.1:{port},http://127.0.0.1:{system_port}"


async def serving(gateway: dict[str, Any]) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{gateway['url']}/health") as answer:
        return int((await answer.json())["serving"])


async def test_a_gateway_that_starts_before_its_worker_waits_for_it(tmp_path: Path) -> None:
    data, system = free_port(), free_port()

    def gateway_first() -> int:
        with ready_process(*GATEWAY, *option(data, system)) as gateway:
            return asyncio.run(serving(gateway))

    with ThreadPoolExecutor(1) as threads:
        ready = asyncio.get_running_loop().run_in_executor(threads, gateway_first)
        await asyncio.sleep(1.5)  # it has looked for the worker, and found nothing
        with ready_process(*worker_arguments(tmp_path, data, system)):
            assert await ready == 1


async def test_a_gateway_starts_without_a_worker_that_is_away_and_takes_it_in_later(
    tmp_path: Path,
) -> None:
    data, system, late_data, late_system = (free_port() for _ in range(4))
    named = (*option(data, system), *option(late_data, late_system), "--wait-seconds", "2")
    with (
        ready_process(*worker_arguments(tmp_path, data, system)),
        ready_process(*GATEWAY, *named) as gateway,
    ):
        assert await serving(gateway) == 1
        with ready_process(*worker_arguments(tmp_path, late_data, late_system)):
            async with asyncio.timeout(20):
                while await serving(gateway) < 2:
                    await asyncio.sleep(0.1)


@pytest.mark.parametrize("url", ["127.0.0.1:8100", "http://127.0.0.1:8100,127.0.0.1:8101"])
def test_a_worker_that_is_no_url_is_refused_at_once(url: str) -> None:
    result = CliRunner().invoke(app, ["gateway", "--worker", url])
    assert result.exit_code != 0
    assert "expected http://HOST:PORT" in f"{result.output}{result.exception}"
