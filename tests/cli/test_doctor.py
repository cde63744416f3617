"""`lockstep doctor` as a person runs it, with torch and without."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from lockstep.doctor import compute, host
from lockstep.doctor.report import COLUMNS

INSTALL_PAGE = Path(__file__).parents[2] / "docs" / "install.md"

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from lockstep.cli import main
sys.argv = ["lockstep", "doctor", *sys.argv[1:]]
main()
"""


def test_every_check_is_one_line_and_the_demo_can_run(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor"],
        capture_output=True, text=True, timeout=170, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    lines = [line.split("  ")[1].strip() for line in process.stdout.splitlines()[:-1]]
    assert lines == ["lockstep", "CPU", "GPUs", "torch", "threads", "exact", "bf16", "CUDA",
                     "port 8000", "port 8001", "run directory", "state directory", "vLLM", "Dynamo",
                     "SGLang"]  # fmt: skip
    assert process.stdout.splitlines()[-1] == "lockstep demo can run here."
    assert list(tmp_path.iterdir()) == []


def test_a_base_install_is_told_which_extra_the_demo_needs(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "--json"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert process.returncode == 1, process.stderr
    report = json.loads(process.stdout)
    assert report["ok"] is False
    (failed,) = [check for check in report["checks"] if check["status"] == "fail"]
    assert "torch not installed" in failed["found"]
    assert failed["way_out"] == "pip install 'lockstep-rl[train]'"
    assert f"{tmp_path}/lockstep" in json.dumps(report["checks"])


def test_the_report_is_one_row_of_the_table_in_the_install_page(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor", "--report"],
        capture_output=True, text=True, timeout=170, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    (line,) = process.stdout.splitlines()
    cpu, python, build, gpu, exact, date = line.removeprefix("| ").removesuffix(" |").split(" | ")
    assert f"{host.cores()} cores" in cpu
    assert python == platform.python_version()
    assert build.startswith(torch.__version__)
    assert gpu == compute.cuda().found.removesuffix(" (optional)")
    assert exact.startswith(("yes, in fp32: ", "no: "))
    assert "rows in multiples of" in exact
    assert datetime.fromisoformat(date)
    assert f"| {' | '.join(COLUMNS)} |" in INSTALL_PAGE.read_text()


def test_a_report_without_torch_says_what_was_not_checked(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "--report"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert process.returncode == 1, process.stderr
    (line,) = process.stdout.splitlines()
    assert "| torch not installed" in line
    assert "| not checked | not checked |" in line


def test_json_and_report_together_are_rejected() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor", "--json", "--report"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (process.returncode, process.stdout) == (2, "")
    assert "give --json or --report, not both" in process.stderr


@pytest.mark.parametrize(("made_for", "way_out"), [(None, "install torch"), ("13.0", "nvidia-smi")])
def test_who_sees_no_gpu_is_told_whether_it_is_torch_or_the_machine(
    monkeypatch: pytest.MonkeyPatch, made_for: str | None, way_out: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", made_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check = compute.cuda()
    assert check.status == "note"
    assert way_out in check.way_out
