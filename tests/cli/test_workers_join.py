"""A gateway that starts without workers serves those that register at its admin port."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from tests.processes import TOKEN

KEY = "key-of-the-workers"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


@contextmanager
def lockstep(*arguments: str, **environ: str) -> Iterator[dict[str, Any]]:
    """A lockstep command; the line that it says when it is ready."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**clean, "LOCKSTEP_ADMIN_TOKEN": TOKEN, **environ},
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        assert line, f"it ended with code {process.wait()}"
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait(30)


async def test_a_worker_with_a_key_that_joins_later_is_served() -> None:
    arguments = ("gateway", "--json", "--workers-join", "--tokenizer", "tiny", "--port", "0",
                 "--admin-port", "0", "--state-dir", "memory")  # fmt: skip
    async with aiohttp.ClientSession() as http:
        with lockstep(*arguments, LOCKSTEP_WORKER_API_KEY=KEY) as gateway:
            await check_joining(http, gateway)


async def check_joining(http: aiohttp.ClientSession, gateway: dict[str, Any]) -> None:
    assert gateway["workers"] == []
    async with http.get(f"{gateway['url']}/health") as answer:
        assert answer.status == 503, "nothing is served yet"
    with lockstep("worker", "tiny", LOCKSTEP_API_KEYS=KEY) as worker:
        body = {"url": worker["url"], "admin_url": worker["system_url"],
                "admin_token": TOKEN, "id": "late"}  # fmt: skip
        workers = f"{gateway['admin_url']}/v1/rl/workers"
        async with http.post(workers, json=body, headers=HEADERS) as answer:
            assert answer.status == 201, await answer.text()
        request = {"model": "tiny", "messages": [{"role": "user", "content": "Reverse: 12"}]}
        chat = f"{gateway['url']}/v1/chat/completions"
        async with http.post(chat, json=request) as answer:
            assert answer.status == 200, await answer.text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers-join"], "--tokenizer"),
        (["--workers-join", "--worker", "http://127.0.0.1:1"], "one of --worker URL"),
        ([], "one of --worker URL"),
    ],
)
def test_what_does_not_say_where_workers_come_from_is_refused(
    arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(app, ["gateway", *arguments])
    assert result.exit_code != 0
    assert said in f"{result.output}{result.exception}"
