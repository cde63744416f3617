"""Lockstep's own servers keep the contract, and the command says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from lockstep.cli.check import check
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest
from tests.processes import TOKEN, ServeProcess, WorkerProcess

APP = typer.Typer()
APP.command()(check)


def run(*arguments: object) -> Result:
    environ = {"LOCKSTEP_ADMIN_TOKEN": TOKEN, "COLUMNS": "200"}
    return CliRunner().invoke(APP, [str(one) for one in arguments], env=environ)


def verdicts(result: Result) -> dict[str, str]:
    report = json.loads(result.stdout)
    return {row["id"]: row["verdict"] for row in report["rows"]}


def failed(result: Result) -> list[Any]:
    report = json.loads(result.stdout)
    return [row for row in report["rows"] if row["verdict"] in ("fail", "error")]


def test_a_worker_keeps_every_data_row(worker: WorkerProcess) -> None:
    result = run(worker.url, "--json", "--tokenizer", bundled("tiny"))
    assert failed(result) == []
    assert result.exit_code == 0
    by_row = verdicts(result)
    passed = [name for name, verdict in by_row.items() if verdict == "pass"]
    assert len(passed) == 30
    assert {name for name, verdict in by_row.items() if verdict == "n.a."} == {
        "text.tokenize", "text.template", "text.chat", "text.detokenize",
        "clients.tools", "experts.rows", "experts.start",
        "agents.messages", "agents.messages_stream", "agents.responses_stream", "agents.previous",
        "agents.one_session", "agents.unknown",
    }  # fmt: skip
    assert json.loads(result.stdout)["held_back"] == 14


def test_a_worker_keeps_the_admin_rows_bit_for_bit(
    worker: WorkerProcess, checkpoint: Path, adapters: tuple[Path, Path]
) -> None:
    result = run(
        worker.url, "--json", "--mutate", "--admin", worker.system_url, "--checkpoint", checkpoint,
        "--adapter", adapters[0], "--adapter", adapters[1],
        "--only", "control.*", "--only", "weights.*", "--only", "adapters.*", "--only", "auth.*",
    )  # fmt: skip
    assert failed(result) == []
    assert set(verdicts(result).values()) == {"pass"}
    evidence = {row["id"]: row["evidence"] for row in json.loads(result.stdout)["rows"]}
    assert "against the checkpoint's probe: bit for bit" in evidence["weights.applied"]


def test_a_gateway_renders_as_the_client_does() -> None:
    served = ServeProcess()
    try:
        result = run(
            served.url, "--json", "--tokenizer", bundled("tiny"), "--admin", served.admin_url
        )
    finally:
        served.stop()
    assert failed(result) == []
    by_row = verdicts(result)
    mine = {
        verdict
        for row, verdict in by_row.items()
        if row.startswith(("text.", "clients.", "agents."))
    }
    assert mine == {"pass"}
    rows = {row["id"]: row["evidence"] for row in json.loads(result.stdout)["rows"]}
    assert "has a sample for each" in rows["clients.temperature"]


def test_a_mixture_of_experts_has_its_rows() -> None:
    worker = WorkerProcess("--max-model-len", "512", model="tiny-moe")
    try:
        result = run(
            worker.url, "--json", "--tokenizer", bundled("tiny-moe"), "--only", "experts.*"
        )
    finally:
        worker.stop()
    assert verdicts(result) == {"experts.rows": "pass", "experts.start": "pass"}


def test_markdown_and_the_table_hold_every_row(worker: WorkerProcess) -> None:
    written = run(worker.url, "--markdown", "--only", "input.*")
    assert written.exit_code == 0
    lines = written.stdout.splitlines()
    assert lines[0] == "| row | checks that | verdict | evidence | law |"
    assert len([line for line in lines if line.startswith("| `input.")]) == 7
    shown = run(worker.url, "--only", "input.*").stdout
    assert "input.overlong" in shown
    assert "7 pass, 0 fail" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "--markdown"), "not both"),
        (("--mutate",), "--admin"),
        (("--only", "nothing.*"), "no row fits"),
        (("--checkpoint", "/no/such/place"), "is not a directory"),
    ],
)
def test_a_wrong_command_is_rejected_with_the_reason(
    worker: WorkerProcess, arguments: tuple[str, ...], message: str
) -> None:
    result = run(worker.url, *arguments)
    assert isinstance(result.exception, BadRequest)
    assert message in result.exception.message


def test_an_unknown_transport_is_rejected_by_the_command_line(worker: WorkerProcess) -> None:
    result = run(worker.url, "--transport", "carrier-pigeon")
    assert result.exit_code == 2
    assert "carrier-pigeon" in result.stderr


def test_a_server_that_is_not_there_ends_in_one_line_and_code_1() -> None:
    result = run("http://127.0.0.1:9", "--transport", "vllm", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "unavailable" in result.stderr
