"""The run directory: resuming from the newest step that is complete on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.manifest import begin, mark_stable, write_manifest
from lockstep.train.records.run_dir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two steps with a checkpoint and a state each."""
    directory = RunDirectory(tmp_path / "run")
    directory.start()
    for step in (1, 2):
        directory.save_state(step, {"optimizer": torch.ones(1000) * step})
        begin(directory.checkpoint(step))
        (directory.checkpoint(step) / "model.safetensors").write_bytes(bytes([step]) * 5000)
        write_manifest(directory.checkpoint(step))
        mark_stable(directory.checkpoint(step))
    return directory


def zero(path: Path) -> None:
    """Zero the contents but keep the size, as a power cut may do."""
    path.write_bytes(bytes(path.stat().st_size))


def hole(path: Path) -> None:
    data = bytearray(path.read_bytes())
    third = len(data) // 3
    data[third : 2 * third] = bytes(third)
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [zero, hole, cut, Path.unlink])
@pytest.mark.parametrize(
    "name",
    ["checkpoints/step-2/model.safetensors", "checkpoints/step-2/manifest.json", "state/step-2.pt"],
)
def test_a_step_with_an_incomplete_file_is_not_resumed_from(
    run: RunDirectory, name: str, damage: Callable[[Path], None]
) -> None:
    assert run.last_step() == 2
    damage(run.path / name)
    assert run.last_step() == 1


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_full_disk_raises_an_os_error(tmp_path: Path, size: int) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.start()
    (tmp_path / "run" / "state" / ".step-1.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        directory.save_state(1, {"optimizer": torch.ones(size)})
