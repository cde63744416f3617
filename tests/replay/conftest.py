"""A recorded run of two workers, one of which is killed, and altered copies of it."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.chain.records import CHAIN, Chain, ChainWriter
from lockstep.train import StepMetrics, TrainConfig, Trainer
from tests.processes import TOKEN, ServeProcess

STEPS, KILLED_AFTER = 8, 3
WORKER = "--max-model-len 256 --prefix-cache-mb 16"
TRAIN = """
import asyncio, json, sys
from lockstep.train import TrainConfig, Trainer
raw, *served = json.loads(sys.argv[1])
asyncio.run(Trainer(TrainConfig.of(raw), *served).run(lambda step: print(step.step, flush=True)))
"""
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def record_run(
    run_dir: Path, model: str, *, workers: int = 1, kill_trainer_after: int = 0, **sections: Any
) -> list[StepMetrics]:
    """Train a short async run. With two workers, one is killed in the middle.

    With `kill_trainer_after`, the trainer is a process that is killed after that step; then the run
    is resumed here.
    """
    raw: dict[str, Any] = {
        "model": model,
        "seed": 1,
        "run_dir": str(run_dir),
        "rollout": {"groups": 4, "group_size": 4, "max_tokens": 32},
        "loop": {"steps": STEPS, "mode": "async", "max_off_policy": 2},
        "learner": {"lr": 3e-4},
        "eval": {"prompts": 0},
    }
    for name, value in sections.items():
        raw[name] = {**raw.get(name, {}), **value}
    gateway = ServeProcess(
        "--workers", str(workers), "--sessions", "memory", "--worker-args", WORKER, model=model
    )
    seen: list[StepMetrics] = []

    def on_step(step: StepMetrics) -> None:
        seen.append(step)
        if workers > 1 and step.step == KILLED_AFTER:
            os.kill(gateway.workers[0]["pid"], signal.SIGKILL)

    try:
        if kill_trainer_after:
            _kill_trainer(run_dir, raw, gateway, kill_trainer_after)
        trainer = Trainer(
            TrainConfig.of(raw), gateway.url, gateway.admin_url, TOKEN,
            resume=bool(kill_trainer_after),
        )  # fmt: skip
        asyncio.run(trainer.run(on_step))
    finally:
        gateway.stop()
    return seen


def _kill_trainer(run_dir: Path, raw: dict[str, Any], gateway: ServeProcess, after: int) -> None:
    """Train in a process of its own and kill it after the metrics of step `after`."""
    arguments = json.dumps([raw, gateway.url, gateway.admin_url, TOKEN])
    process = subprocess.Popen([sys.executable, "-c", TRAIN, arguments], stdout=subprocess.PIPE)
    if process.stdout is None:
        raise RuntimeError("the output of the trainer cannot be read")
    for _ in range(after):
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the trainer ended with code {process.wait()}")
    process.kill()
    process.wait()


@pytest.fixture(scope="package")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    seen = record_run(run_dir, "tiny", workers=2)
    assert [step.step for step in seen] == list(range(1, STEPS + 1))
    assert any(step.off_policy_max > 0 for step in seen)
    events = (run_dir / "events.jsonl").read_text()
    assert '"worker_lost"' in events
    return run_dir


def command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `lockstep` to its end."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    return subprocess.run(
        [Path(sys.executable).with_name("lockstep"), *arguments], env=clean, cwd=cwd,
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip


def altered(run: Path, copy: Path, change: Change, *, relink: bool = True) -> Path:
    """Return a copy of a run in which `change(record, contents)` was applied to every step.

    With `relink`, the chain is written anew, as by a run in which this happened.
    """
    shutil.copytree(run, copy)
    chain = Chain.read(copy)
    if relink:
        (copy / CHAIN).unlink()
    writer = ChainWriter(copy)
    for link in chain.links:
        record = dict(link.record)
        contents: dict[str, Any] = {}
        if link.kind == "step":
            path = copy / "chain" / record["file"]["name"]
            contents = json.loads(gzip.decompress(path.read_bytes()))
        before = json.dumps(contents)
        change(record, contents)
        if json.dumps(contents) != before:
            data = json.dumps(contents).encode()
            record["file"] = writer.write_file(record["file"]["name"], data)
        if relink:
            body = {k: v for k, v in record.items() if k not in ("kind", "step", "previous")}
            writer.append(record["kind"], record["step"], **body)
    return copy
