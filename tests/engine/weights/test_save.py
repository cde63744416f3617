"""Files whose digests are computed while writing are equal to those of other writers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lockstep.checkpoint import manifest
from lockstep.checkpoint.safetensors_file import TensorFile
from lockstep.checkpoint.tensor_scan import digests
from lockstep.checkpoint.validate import Checkpoint
from lockstep.checkpoint.whole_reader import WholeReader
from lockstep.engine.probe import save_checkpoint
from lockstep.engine.weights import save
from lockstep.engine.weights.save import SavedFiles
from lockstep.models import bundled
from lockstep.tokens.errors import CheckpointError


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "PIECE", 64)
    monkeypatch.setattr(save, "SYNC_BYTES", 256)


def tiny() -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype=torch.float32)


@pytest.mark.usefixtures("small_pieces")
def test_a_written_file_is_readable_and_has_the_reported_digests(
    tmp_path: Path,
) -> None:
    tensors = {
        "small.ä": torch.randn(3).to(torch.bfloat16),
        "large": torch.randn(100, 17),
        "turned": torch.randn(8, 9).T,
        "number": torch.tensor(3),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
    }
    path, saved = tmp_path / "some.safetensors", SavedFiles()
    saved.save_file(tensors, path, metadata={"format": "pt"})
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert saved.tensors == digests(WholeReader(tmp_path, [TensorFile.read(path)]))
    record = saved.files["some.safetensors"]
    assert record.size == path.stat().st_size
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.failure_mode("F34")
def test_a_full_disk_is_an_error(small_pieces: None) -> None:
    with pytest.raises(OSError, match="No space left"):
        SavedFiles().save_file({"a": torch.zeros(1000)}, "/dev/full")


def test_a_dtype_that_no_worker_serves_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'a' has dtype torch\.complex64"):
        SavedFiles().save_file({"a": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "a")


def test_a_checkpoint_is_not_read_again_to_be_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []
    whole = manifest.sha256_of

    def sha256(path: Path) -> str:
        hashed.append(path.name)
        return whole(path)

    monkeypatch.setattr(manifest, "sha256_of", sha256)
    path = save_checkpoint(tiny(), tmp_path / "step", sequences=[[1, 2, 3]])
    assert "model.safetensors" not in hashed
    assert Checkpoint.validate(path, verify_hashes=True)
    assert "model.safetensors" in hashed


def test_files_of_other_writers_are_read_for_their_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.modeling_utils

    model = tiny()
    ours = save_checkpoint(model, tmp_path / "ours", sequences=[[1, 2, 3]])
    monkeypatch.setattr(save, "SAVE_FUNCTION", "a_name_that_is_not_there")
    before = transformers.modeling_utils.safe_save_file
    theirs = save_checkpoint(model, tmp_path / "theirs", sequences=[[1, 2, 3]])
    assert transformers.modeling_utils.safe_save_file is before
    assert Checkpoint.validate(theirs, verify_hashes=True)
    recorded = [manifest.Manifest.read(path) for path in (ours, theirs)]
    assert recorded[0] is not None
    assert recorded[1] is not None
    assert recorded[0].tensors == recorded[1].tensors != {}
