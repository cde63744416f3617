"""The command line, run as a person would run it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def lockstep(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, **environ},
        check=False,
    )


@pytest.mark.parametrize("way", ["version", "--version"])
def test_version_prints_the_version(way: str) -> None:
    process = lockstep(way)
    assert process.returncode == 0
    assert process.stdout.startswith("lockstep ")


def test_help_names_every_command_without_loading_torch() -> None:
    code = "import sys, lockstep.cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["False", "False"]
    shown = lockstep("--help").stdout
    for command in (
        "demo",
        "doctor",
        "serve",
        "gateway",
        "worker",
        "train",
        "check",
        "state",
        "version",
    ):
        assert command in shown


def test_mistakes_end_in_one_line_and_a_code() -> None:
    for arguments, message in (
        (("worker", "/no/such/model"), "config.json does not exist"),
        (("serve", "Qwen/Qwen3-0.6B"), "`hf download Qwen/Qwen3-0.6B --local-dir"),
        (("worker", "tiny", "--max-model-len", "1"), "max_model_len is 1"),
        (("worker", "tiny", "--kv-cache-mb", "1"), "kv_bytes"),
        (("worker", "tiny", "--arithmetic", "exact", "--dtype", "bfloat16"), "float32"),
    ):
        process = lockstep(*arguments, COLUMNS="300")
        assert process.returncode == 2
        assert message in process.stderr
        assert "Traceback" not in process.stderr
    process = lockstep("version", LOCKSTEP_TYPO="1")
    assert (process.returncode, "LOCKSTEP_TYPO" in process.stderr) == (2, True)
