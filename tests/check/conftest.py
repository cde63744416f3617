"""A real worker, other weights for it with a probe, and adapters: made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import exact
from lockstep.engine.probe import save_checkpoint
from lockstep.models import bundled
from tests.processes import WorkerProcess
from tests.worker.adapters import write_adapter


@pytest.fixture(scope="package")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", "1024", "--max-num-seqs", "16")
    yield process
    process.stop()


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed("tiny", tmp_path_factory.mktemp("weights") / "other")


@pytest.fixture(scope="package")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return write_adapter(place / "a", seed=0), write_adapter(place / "b", seed=1)


def perturbed(name: str, target: Path) -> Path:
    """A bundled model with noise on its weights, saved with a probe."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(bundled(name), dtype=torch.float32)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=rng)
                parameter += 0.1 * parameter.std() * noise
    return save_checkpoint(exact.prepare(model.eval()), target)
