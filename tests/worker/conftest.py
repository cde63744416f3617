"""A real worker process, shared by the tests of a module."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.models import bundled
from tests.processes import WorkerProcess


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", "1024", "--max-num-seqs", "8")
    yield process
    process.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a perturbed copy of a bundled model."""

    def write(name: str, model: str = "tiny", seed: int = 1, scale: float = 0.1) -> Path:
        source, target = bundled(model), tmp_path / name
        assert source is not None
        shutil.copytree(source, target)
        generator = torch.Generator().manual_seed(seed)
        tensors = load_file(source / "model.safetensors")
        for key, tensor in tensors.items():
            if tensor.ndim > 1:
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[key] = tensor + scale * tensor.std() * noise
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return target

    return write
