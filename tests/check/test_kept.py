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
    done = run(worker.url, "--json", "--tokenizer", bundled("tiny"))
    assert failed(done) == []
    assert done.exit_code == 0
    found = verdicts(done)
    asked = [name for name, verdict in found.items() if verdict == "pass"]
    assert len(asked) == 23
    assert {name for name, verdict in found.items() if verdict == "n.a."} == {
        "text.tokenize", "text.template", "text.chat", "text.detokenize",
        "experts.rows", "experts.start",
    }  # fmt: skip
    assert json.loads(done.stdout)["held_back"] == 14


def test_a_worker_keeps_the_admin_rows_bit_for_bit(
    worker: WorkerProcess, checkpoint: Path, adapters: tuple[Path, Path]
) -> None:
    done = run(
        worker.url, "--json", "--mutate", "--admin", worker.system_url, "--checkpoint", checkpoint,
        "--adapter", adapters[0], "--adapter", adapters[1],
        "--only", "control.*", "--only", "weights.*", "--only", "adapters.*", "--only", "guard.*",
    )  # fmt: skip
    assert failed(done) == []
    assert set(verdicts(done).values()) == {"pass"}
    evidence = {row["id"]: row["evidence"] for row in json.loads(done.stdout)["rows"]}
    assert "against the checkpoint's probe: bit for bit" in evidence["weights.applied"]


def test_a_gateway_renders_as_the_client_does() -> None:
    served = ServeProcess()
    try:
        done = run(served.url, "--json", "--tokenizer", bundled("tiny"))
    finally:
        served.stop()
    assert failed(done) == []
    found = verdicts(done)
    assert {found[f"text.{name}"] for name in ("tokenize", "template", "chat", "detokenize")} == {
        "pass"
    }


def test_a_mixture_of_experts_has_its_rows() -> None:
    worker = WorkerProcess("--max-model-len", "512", model="tiny-moe")
    try:
        done = run(worker.url, "--json", "--tokenizer", bundled("tiny-moe"), "--only", "experts.*")
    finally:
        worker.stop()
    assert verdicts(done) == {"experts.rows": "pass", "experts.start": "pass"}


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
    ("arguments", "said"),
    [
        (("--json", "--markdown"), "exclude each other"),
        (("--mutate",), "--admin"),
        (("--transport", "carrier-pigeon"), "carrier-pigeon"),
        (("--only", "nothing.*"), "no row fits"),
        (("--checkpoint", "/no/such/place"), "is not a directory"),
    ],
)
def test_a_wrong_command_is_told_so(
    worker: WorkerProcess, arguments: tuple[str, ...], said: str
) -> None:
    done = run(worker.url, *arguments)
    assert isinstance(done.exception, BadRequest)
    assert said in done.exception.message


def test_a_server_that_is_not_there_ends_in_one_line_and_code_1() -> None:
    done = run("http://127.0.0.1:9", "--transport", "vllm", "--json")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "unavailable" in done.stderr
