"""A fleet of two workers behind a gateway, and short runs against it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.train import TrainConfig, Trainer
from tests.ports import free_port
from tests.processes import TOKEN, ServeProcess


class Stack:
    """Gateway and workers on ports that stay the same when all of it is killed and restarted."""

    def __init__(self, where: Path) -> None:
        ports = ("--port", str(free_port()), "--admin-port", str(free_port()))
        self._arguments = (*ports, "--workers", "2", "--state-dir", str(where), "--worker-args",
                           "--max-model-len 256 --prefix-cache-mb 16")  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = ServeProcess(*self._arguments)

    def kill_gateway(self) -> None:
        self.process.process.kill()
        self.process.process.wait()

    def kill_worker(self, at: int) -> None:
        os.kill(self.process.workers[at]["pid"], signal.SIGKILL)

    def trainer(self, config: TrainConfig, **options: Any) -> Trainer:
        return Trainer(config, self.process.url, self.process.admin_url, TOKEN, **options)


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("stack"))
    yield made
    made.process.stop()


def run_config(run_dir: Path, **sections: Any) -> TrainConfig:
    """A short run; sections are merged into it."""
    small: dict[str, Any] = {
        "seed": 1,
        "rollout": {"groups": 4, "group_size": 4, "max_tokens": 32},
        "loop": {"steps": 3},
        "eval": {"prompts": 0},
        "serve": {"retry_seconds": 60},
    }
    for name, value in sections.items():
        small[name] = {**small.get(name, {}), **value} if isinstance(value, dict) else value
    return TrainConfig.of({**small, "run_dir": str(run_dir)})
