"""Blocks of the documentation that need a real engine do what their page says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from lockstep.engine.probe import write_probe
from lockstep.models import bundled
from tests.docs.blocks import ROOT, pages, runnable
from tests.docs.page_runner import PageRunner, reading
from tests.engine.checkpoints import trainer, variant
from tests.engines.vllm_servers import Slot

pytestmark = pytest.mark.timeout(900)
ENGINES = ("vllm", "dynamo")
"""Engines that README has a block for."""
README = "README.md"
CASES = [
    (page, engine)
    for engine in (*ENGINES, "sglang")
    for page in pages()
    if page != README and runnable(page, engine)
]
GATEWAY_PORT = {"vllm": "8000", "dynamo": "9000"}
"""Data port of the gateway that README's block starts."""
TURN = {"model": "tiny", "temperature": 0, "stream": True}
QUESTION = [{"role": "user", "content": "Reverse: 40213"}]
STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": QUESTION, "max_tokens": 24}, "data: [DONE]"),
    "/v1/messages": ({"messages": QUESTION, "max_tokens": 24}, "event: message_stop"),
    "/v1/responses": ({"input": QUESTION, "max_output_tokens": 24}, "event: response.completed"),
}
"""A request in each dialect, and the line that only a stream without an error ends with."""


def start(engine: str, slot: Slot) -> None:
    if not (ROOT / f".venv-{engine}").exists():
        pytest.skip(f".venv-{engine} is not there: run scripts/install-{engine}.sh")
    slot.stop()  # its memory is needed


@pytest.mark.parametrize(("page", "engine"), CASES)
def test_the_page_does_what_it_says(
    page: str, engine: str, tmp_path: Path, vllm_slot: Slot
) -> None:
    start(engine, vllm_slot)
    with reading(tmp_path) as reader:
        for block in runnable(page, engine):
            reader.run(block)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_readme_starts_streams_updates_keeps_the_contract_and_restarts(
    engine: str, tmp_path: Path, vllm_slot: Slot
) -> None:
    start(engine, vllm_slot)
    weights = variant(bundled("tiny") or Path(), tmp_path / "step-1", seed=1)
    # vLLM's kernels are not the trainer's: they agree within 1e-3.
    tolerance = 1e-3 if engine == "vllm" else 0.0
    write_probe(trainer(weights), weights, version="step-1", tolerance=tolerance)
    with reading(tmp_path) as reader:
        url = f"http://127.0.0.1:{reader.ports[GATEWAY_PORT[engine]]}"
        for block in runnable(README, engine):
            reader.run(block)
        stream_in_all_dialects(url)
        if engine == "dynamo":  # the block of vLLM does it itself
            assert failures(command(reader, "check", url, "--tokenizer", "tiny", "--json")) == {}

        update = command(reader, "update-weights", str(weights), "--version", "step-1", "--json")
        operation = update["operation"]
        assert operation["status"] == "done", operation
        assert {worker["status"] for worker in operation["workers"].values()} == {"ok"}
        assert all(worker["evidence"] for worker in operation["workers"].values()), operation

        stop(reader)
        for line in servers(engine):
            reader._command(line, README)
        stream_in_all_dialects(url)
        state = command(reader, "state", "--json")
        assert state["version"] == "step-1"
        assert [worker["version"] for worker in state["workers"]] == ["step-1"] * len(
            state["workers"]
        )


def stream_in_all_dialects(url: str) -> None:
    for path, (body, end) in STREAMS.items():
        response = httpx.post(url + path, json={**TURN, **body}, timeout=120)
        assert response.status_code == 200, response.text
        assert any(line.startswith(end) for line in response.text.splitlines()), response.text


def servers(engine: str) -> list[str]:
    """The commands of README's block that start servers."""
    [block] = runnable(README, engine)
    return [
        line for line in block.commands() if line.startswith("lockstep ") and "check" not in line
    ]


def stop(reader: PageRunner) -> None:
    """Stop all servers as Ctrl-C does, the gateway first."""
    while reader.servers:
        reader.servers.pop().stop()


def command(reader: PageRunner, *words: str) -> dict[str, Any]:
    """The JSON that a command of the reader prints."""
    done = subprocess.run(
        ["lockstep", *words], cwd=reader.directory, env=reader.environ, timeout=300,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def failures(report: dict[str, Any]) -> dict[str, str]:
    """Evidence of the rows of `lockstep check` that did not hold, by id."""
    rows = [row for row in report["rows"] if row["verdict"] in ("fail", "error")]
    return {row["id"]: row["evidence"] for row in rows}
