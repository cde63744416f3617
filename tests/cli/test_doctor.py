"""`lockstep doctor` as a person runs it, with torch and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from lockstep.cli import main
sys.argv = ["lockstep", "doctor", "--json"]
main()
"""


def test_every_check_is_one_line_and_the_demo_can_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "doctor"],
        capture_output=True, text=True, timeout=170, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("  ")[1].strip() for line in done.stdout.splitlines()[:-1]]
    assert lines == ["lockstep", "CPU", "torch", "threads", "exact", "bf16", "CUDA", "port 8000",
                     "port 8001", "run directory", "state directory", "vLLM", "Dynamo",
                     "SGLang"]  # fmt: skip
    assert done.stdout.splitlines()[-1] == "lockstep demo can run here."
    assert list(tmp_path.iterdir()) == []


def test_a_base_install_is_told_which_extra_the_demo_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is False
    (torch,) = [check for check in told["checks"] if check["status"] == "fail"]
    assert "torch not installed" in torch["found"]
    assert torch["way_out"] == "pip install 'lockstep-rl[train]'"
    assert f"{tmp_path}/lockstep" in json.dumps(told["checks"])
