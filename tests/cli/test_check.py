"""`lockstep check` as a person runs it: bundled names, and tables that fit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.processes import WorkerProcess


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", "512")
    yield process
    process.stop()


def check(worker: WorkerProcess, *arguments: str, **environ: str) -> tuple[int, str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP_", "COLUMNS"))}
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", "check", worker.url, *arguments],
        capture_output=True, text=True, timeout=120, env={**clean, **environ}, check=False,
    )  # fmt: skip
    return process.returncode, process.stdout, process.stderr


def test_a_bundled_tokenizer_is_named_as_everywhere(worker: WorkerProcess) -> None:
    code, shown, errors = check(worker, "--tokenizer", "tiny", "--only", "text.*", "--json")
    assert code == 0, errors
    assert "no tokenizer was given" not in shown
    code, _, errors = check(worker, "--tokenizer", "/no/such/tokenizer")
    assert code == 2
    assert "--tokenizer /no/such/tokenizer is not a directory" in errors
    assert "tiny-moe" in errors


def test_a_row_takes_one_line_and_its_evidence_is_given_on_demand(worker: WorkerProcess) -> None:
    code, shown, errors = check(worker, "--only", "tokens.*", COLUMNS="80")
    assert code == 0, errors
    lines = shown.splitlines()
    rows = [line for line in lines if line.startswith("tokens.")]
    assert len(rows) > 3
    assert lines[2 : 2 + len(rows)] == rows  # under a title and a heading, with nothing between
    assert max(map(len, rows)) <= 80
    assert any(row.endswith("…") for row in rows)
    assert "--details" in lines[-1]
    _, whole, _ = check(worker, "--only", "tokens.*", "--details", COLUMNS="80")
    _, piped, _ = check(worker, "--only", "tokens.*")
    assert "…" not in whole
    assert "…" not in piped
    assert len(whole) > len(shown)
