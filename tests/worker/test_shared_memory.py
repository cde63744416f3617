"""Weights through POSIX shared memory: written once, read by workers, freed only by the writer."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.weights import shared_memory as shared
from lockstep.engine.weights.shared_memory import (
    free_shared,
    read_shared,
    shared_tensors,
    write_shared,
)
from lockstep.protocol.control.worker import PlacedTensor, placed
from lockstep.tokens.errors import BadRequest, NotFound, Unavailable

BLOCKS = Path("/dev/shm")
TENSORS = {
    "a": torch.arange(5, dtype=torch.float32),
    "b": torch.randn(3, 7).to(torch.bfloat16),
    "c": torch.randn(2, 3, 4).to(torch.float16).transpose(0, 2),
}


def test_tensors_are_read_as_written() -> None:
    with shared_tensors(TENSORS) as (name, specs):
        places = placed(specs)
        assert [place.offset % 64 for place in places] == [0, 0, 0]
        read = dict(read_shared(name, places))
        assert {n: (t.dtype, t.shape) for n, t in read.items()} == {
            n: (t.dtype, t.shape) for n, t in TENSORS.items()
        }
        assert all(torch.equal(read[n], t) for n, t in TENSORS.items())
    assert not (BLOCKS / name).exists()
    assert all(torch.equal(read[n], t) for n, t in TENSORS.items()), "copies outlive the block"


def test_a_reader_that_exits_does_not_remove_the_block() -> None:
    name, _ = write_shared({"a": TENSORS["a"]})
    code = (
        "from lockstep.engine.weights.shared_memory import read_shared\n"
        "from lockstep.protocol.control.worker import PlacedTensor\n"
        f"print(next(read_shared({name!r}, [PlacedTensor('a', 'float32', (5,))]))[1].tolist())"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[0.0, 1.0, 2.0, 3.0, 4.0]"
    assert "resource_tracker" not in process.stderr
    assert (BLOCKS / name).exists()
    assert free_shared(name)
    assert not free_shared(name)


@pytest.mark.failure_mode("F35")
def test_the_block_of_a_killed_writer_is_removed() -> None:
    code = (
        "import os, signal, torch\n"
        "from lockstep.engine.weights.shared_memory import write_shared\n"
        "print(write_shared({'a': torch.ones(3)})[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    # The pipes end when the process that cleans up behind the writer has ended too.
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    name = process.stdout.strip()
    assert name
    assert not (BLOCKS / name).exists()


@pytest.mark.parametrize(
    ("place", "field"),
    [
        (PlacedTensor("a", "float32", (6,)), "ends at byte"),
        (PlacedTensor("a", "float32", (1,), 4), "multiple of 64"),
        (PlacedTensor("a", "float32", (1,), -64), "multiple of 64"),
        (PlacedTensor("a", "int8", (1,)), "dtype"),
        (PlacedTensor("a", "float32", (0,)), "shape"),
        (PlacedTensor("a", "float32", (1,), 1 << 40), "ends at byte"),
    ],
)
def test_a_tensor_outside_the_block_is_rejected(place: PlacedTensor, field: str) -> None:
    with shared_tensors({"a": TENSORS["a"]}) as (name, _):
        size = (BLOCKS / name).stat().st_size
        placed_tensor = place if place.shape != (6,) else PlacedTensor("a", "float32", (size,))
        with pytest.raises(BadRequest, match=field):
            read_shared(name, [placed_tensor])


@pytest.mark.failure_mode("F33")
@pytest.mark.parametrize("name", ["", "../etc/passwd", "/etc/passwd", "a/b", ".", "x" * 300])
def test_a_name_that_is_a_path_is_rejected(name: str) -> None:
    with pytest.raises(BadRequest, match="shared_name"):
        read_shared(name, [])


def test_a_missing_block_is_not_found() -> None:
    with pytest.raises(NotFound, match="nothing-here"):
        read_shared("nothing-here", [])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the blocks that a test creates."""
    names: list[str] = []

    class Recorded(SharedMemory):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            names.append(self.name)

    monkeypatch.setattr(shared, "SharedMemory", Recorded)
    return names


def test_full_shared_memory_is_an_error_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, made: list[str]
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared.os, "posix_fallocate", full)
    with pytest.raises(Unavailable, match="No space left"):
        write_shared(TENSORS)
    assert [(BLOCKS / name).exists() for name in made] == [False]


def test_an_unsupported_dtype_is_rejected_before_a_block_is_created(made: list[str]) -> None:
    for tensors in ({}, {"a": torch.ones(2, dtype=torch.int64)}):
        with pytest.raises(BadRequest):
            write_shared(tensors)
    assert made == []
