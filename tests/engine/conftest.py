"""Fixtures of the engine's tests: the bundled models, and second sets of weights for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.engine import Engine
from lockstep.models import bundled
from tests.engine import checkpoints, running

# Kernels for CUDA are run by Triton's interpreter here; Triton asks for this when it is imported.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Path:
    directory = bundled("tiny")
    assert directory is not None
    return directory


@pytest.fixture(scope="session")
def moe() -> Path:
    directory = bundled("tiny-moe")
    assert directory is not None
    return directory


@pytest.fixture(scope="session")
def tiny2(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for `tiny`."""
    return checkpoints.variant(tiny, tmp_path_factory.mktemp("tiny2"), seed=2)


@pytest.fixture(scope="session")
def moe2(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for `tiny-moe`."""
    return checkpoints.variant(moe, tmp_path_factory.mktemp("moe2"), seed=2)


@pytest.fixture(scope="session")
def lora_a(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.adapter(tiny, tmp_path_factory.mktemp("lora_a"), seed=1)


@pytest.fixture(scope="session")
def lora_b(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second adapter, with another rank and more modules."""
    modules = checkpoints.ALL_LINEAR
    target = tmp_path_factory.mktemp("lora_b")
    return checkpoints.adapter(tiny, target, rank=3, modules=modules, seed=2, alpha=5)


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[Engine]:
    engine = running.make(tiny)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """The module's engine, which every test must leave idle."""
    yield shared
    assert shared.core.handles == {}
    assert shared.core.scheduler.running == []
    assert not shared.core.scheduler.has_waiting
    assert shared.stats()["state"] == "running"
