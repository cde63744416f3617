"""A gateway that starts without workers serves those that register at its admin port."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from tests.processes import TOKEN, ready_process

KEY = "key-of-the-workers"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


async def test_a_worker_with_a_key_that_joins_later_is_served() -> None:
    arguments = ("gateway", "--json", "--workers-join", "--tokenizer", "tiny", "--port", "0",
                 "--admin-port", "0", "--state-dir", "memory")  # fmt: skip
    async with aiohttp.ClientSession() as http:
        with ready_process(*arguments, LOCKSTEP_WORKER_API_KEY=KEY) as gateway:
            await check_joining(http, gateway)


async def check_joining(http: aiohttp.ClientSession, gateway: dict[str, Any]) -> None:
    assert gateway["workers"] == []
    async with http.get(f"{gateway['url']}/health") as answer:
        assert answer.status == 503, "nothing is served yet"
    with ready_process("worker", "tiny", LOCKSTEP_API_KEYS=KEY) as worker:
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
    ("arguments", "message"),
    [
        (["--workers-join"], "--tokenizer"),
        (["--workers-join", "--worker", "http://127.0.0.1:1"], "one of --worker URL"),
        ([], "one of --worker URL"),
    ],
)
def test_what_does_not_say_where_workers_come_from_is_refused(
    arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["gateway", *arguments])
    assert result.exit_code != 0
    assert message in f"{result.output}{result.exception}"
