"""Alerts, dashboard and probes of deploy/ are about what a running fleet says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import aiohttp
import yaml

from tests.deploy.files import DEPLOY
from tests.processes import TOKEN, ServeProcess

SERVE = ("--state-dir", "memory")

NAME = re.compile(r"\blockstep_[a-z_]+\b")
OF_PROMETHEUS = {"up"}


def expressions() -> list[str]:
    rules = yaml.safe_load((DEPLOY / "monitoring/rules.yml").read_text())
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    board = json.loads((DEPLOY / "monitoring/grafana-dashboard.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(alerts) > 5
    assert len(shown) > 10
    return alerts + shown


async def test_every_metric_that_is_watched_exists(served_gateway: ServeProcess) -> None:
    text = ""
    async with aiohttp.ClientSession() as http:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Reverse: 12"}]}
        async with http.post(f"{served_gateway.url}/v1/chat/completions", json=chat) as answer:
            assert answer.status == 200, await answer.text()
        for url in (served_gateway.url, served_gateway.workers[0]["url"]):
            async with http.get(f"{url}/metrics") as answer:
                text += await answer.text()
    there = set(NAME.findall("\n".join(line for line in text.splitlines() if line[:1] != "#")))
    used = {name for each in expressions() for name in NAME.findall(each)}
    assert used - there == set()


def ready(served_gateway: ServeProcess, worker: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, DEPLOY / "ready.py", worker],
        env={**os.environ, "LOCKSTEP_ADMIN_URL": served_gateway.admin_url,
             "LOCKSTEP_ADMIN_TOKEN": TOKEN},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return done.returncode, done.stderr


async def test_a_worker_is_ready_when_it_was_proved_and_not_before(
    served_gateway: ServeProcess,
) -> None:
    worker = served_gateway.workers[0]["id"]
    assert ready(served_gateway, worker) == (0, "")
    code, output = ready(served_gateway, "nobody:8100")
    assert (code, output[:3]) == (1, "404")
    # One that runs, but is not what the gateway was told of: it is never proved.
    headers = {"authorization": f"Bearer {TOKEN}"}
    body = {"url": "http://127.0.0.1:9", "admin_url": "http://127.0.0.1:9", "backend": "lockstep",
            "id": "away:8100"}  # fmt: skip
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{served_gateway.admin_url}/v1/rl/workers", json=body) as answer:
            assert answer.status == 201, await answer.text()
    code, output = ready(served_gateway, "away:8100")
    assert (code, output[:3]) == (1, "503")
