"""A short demo with real processes and a killed worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lockstep.run_record import Run
from lockstep.train.records.run_dir import RunDirectory


def run(
    *arguments: str, cwd: Path, **environ: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LOCKSTEP_")}
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", "demo", "--json", *arguments],
        capture_output=True, text=True, timeout=170, env={**clean, **environ}, cwd=cwd, check=False,
    )  # fmt: skip
    lines = process.stdout.splitlines()
    return process, json.loads(lines[-1]) if lines else {}


def test_three_steps_with_a_killed_worker_stay_exact(tmp_path: Path) -> None:
    process, row = run("--steps", "3", "--run-dir", "run", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("\n") == 1
    assert row["mismatch_kl"] == 0
    assert row["masked"] == 0
    assert row["breaks"] == 0
    assert row["versions"] == {"w0": "step-3", "w1": "step-3"}
    assert row["pause_seconds"] > 0
    assert row["step_seconds"] > 0
    assert 0 <= row["reward_before"] <= 1
    assert Path(row["report"]) == tmp_path / "run" / "report.html"
    assert "suppressed" in process.stderr
    replayed = row["replay"]
    assert replayed["held"] is True
    assert (replayed["steps"], replayed["differences"]) == ([3], [])
    assert replayed["draws"] >= 128
    assert '"mark":"audited"' in Path(row["report"]).read_text()

    read = Run.read(tmp_path / "run")
    assert [step["step"] for step in read.steps] == [1, 2, 3]
    assert {"worker_killed", "worker_back"} <= {event["kind"] for event in read.events}
    for sample in read.samples:
        both = zip(sample["logprobs"], sample["trainer_logprobs"], strict=True)
        pairs = [pair for pair, own in zip(both, sample["sampled_mask"], strict=True) if own]
        assert pairs
        assert all(engine == trainer for engine, trainer in pairs)
    assert "worker w1 is killed" in Path(row["report"]).read_text()


def test_a_directory_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start()
    directory.write_run(seed=1)
    process, _ = run("--run-dir", "run", cwd=tmp_path)
    assert process.returncode != 0
    assert "already holds a run" in process.stderr.replace("\n", " ")
    assert [path.name for path in (tmp_path / "run").glob("*.*")] == ["run.json"]
