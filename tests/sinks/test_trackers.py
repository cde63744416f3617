"""Every tracker for real, offline: a short run logs to all of them, and each has what it logged."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.processes import TOKEN, ServeProcess

SERVE = ("--sessions", "memory", "--worker-args", "--max-model-len 256")

PYTHON = Path(".venv-sinks/bin/python").absolute()
CONFIG = """
run_dir = {run_dir!r}
sinks = ["jsonl", "wandb", "tensorboard", "trackio", "mlflow"]
[serve]
url = {url!r}
admin_url = {admin_url!r}
[rollout]
groups = 2
group_size = 2
max_tokens = 16
[loop]
steps = {steps}
[eval]
prompts = 4
"""


def train(
    served_gateway: ServeProcess, where: Path, steps: int, *options: str, **more: str
) -> list[Any]:
    """The JSON lines of a run with every tracker."""
    config = where / "run.toml"
    text = CONFIG.format(
        run_dir=str(where / "run"),
        url=served_gateway.url,
        admin_url=served_gateway.admin_url,
        steps=steps,
    )
    config.write_text(text)
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(where / "home"), "LOCKSTEP_ADMIN_TOKEN": TOKEN,
        "WANDB_MODE": "offline", "TRACKIO_DIR": str(where / "trackio"), "MLFLOW_ENABLE_TELEMETRY":
        "false", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE", **more,
    }  # fmt: skip
    (where / "home").mkdir(exist_ok=True)
    done = subprocess.run(
        [PYTHON, "-m", "lockstep", "train", config, "--json", *options],
        env=environ, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def read_back(run: Path) -> dict[str, dict[str, float]]:
    script = Path(__file__).with_name("read_back.py")
    done = subprocess.run(
        [PYTHON, script, run], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    stored: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return stored


def test_all_trackers_hold_the_metrics_of_the_run_and_stdout_stays_json(
    served_gateway: ServeProcess, tmp_path: Path
) -> None:
    *steps, _ = train(served_gateway, tmp_path, 2)
    stored = read_back(tmp_path / "run")
    assert set(stored) == {"tensorboard", "mlflow", "trackio", "wandb"}
    for name, rows in stored.items():
        assert set(rows) == {"1", "2"}, name
        for step in steps:
            assert rows[str(step["step"])] == pytest.approx(step["reward"], abs=1e-6), name
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "sink_failed" not in events


def test_a_tracker_that_cannot_be_reached_costs_a_line_and_not_the_run(
    served_gateway: ServeProcess, tmp_path: Path
) -> None:
    steps = train(
        served_gateway, tmp_path, 1,
        MLFLOW_TRACKING_URI="http://127.0.0.1:9", MLFLOW_HTTP_REQUEST_MAX_RETRIES="0",
    )  # fmt: skip
    assert steps[0]["step"] == 1
    lines = (tmp_path / "run" / "events.jsonl").read_text()
    events = [json.loads(line) for line in lines.splitlines()]
    assert [event["sink"] for event in events if event["kind"] == "sink_failed"] == ["mlflow"]
