"""`lockstep tinker` refuses what clients could not use, before it starts anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    return subprocess.run(
        [sys.executable, "-m", "lockstep", "tinker", *arguments],
        env=clean | environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "environ", "says"),
    [
        (("nowhere",), {}, "expected a bundled name or a directory"),
        (("tiny", "--host", "0.0.0.0"), {}, "would serve everybody"),
        (("tiny",), {"LOCKSTEP_API_KEYS": "sk-123456789"}, "no key that begins with tml-"),
        (("tiny", "--store", "postgresql://db/x"), {}, "gateways without a trainer"),
        (("tiny", "--worker", "http://127.0.0.1:1"), {}, "add --engine vllm"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    arguments: tuple[str, ...], environ: dict[str, str], says: str, tmp_path: Path
) -> None:
    ports = ("--port", "0", "--admin-port", "0")
    result = run(*arguments, *ports, "--state-dir", str(tmp_path / "state"), **environ)
    assert result.returncode == 2
    assert says in result.stderr
    assert not (tmp_path / "state").exists()
