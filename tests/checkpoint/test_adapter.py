"""Adapters are checked as checkpoints are, before anything large is read."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.adapter import SETTINGS, WEIGHTS, AdapterFiles
from lockstep.tokens.errors import AdapterError, Forbidden
from tests.simulator.workers import write_adapter

A, B = (f"base_model.model.q_proj.lora_{side}.weight" for side in "AB")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "roots" / "adapter", 1)


def settings(path: Path, **changes: Any) -> None:
    before = json.loads((path / SETTINGS).read_text())
    (path / SETTINGS).write_text(json.dumps(before | changes))


def header(path: Path, size: int = 0, **entries: tuple[str, list[int], int]) -> None:
    """Write a tensor file with these entries (dtype, shape, bytes), sparse up to `size` bytes."""
    at, tensors = 0, {}
    for name, (dtype, shape, nbytes) in entries.items():
        full = f"base_model.model.q_proj.lora_{name}.weight"
        tensors[full] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(tensors).encode()
    with open(path / WEIGHTS, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + max(at, size))


def read(path: Path) -> None:
    AdapterFiles.read(path, (path.parent,)).check_modules()


def test_a_sound_adapter_passes(adapter: Path) -> None:
    read(adapter)


@pytest.mark.parametrize("name", [SETTINGS, WEIGHTS, "other"])
def test_a_symlink_out_of_the_roots_is_forbidden(adapter: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("{}")
    (adapter / name).unlink(missing_ok=True)
    (adapter / name).symlink_to(outside)
    with pytest.raises(Forbidden, match="symlink out of the allowed roots"):
        read(adapter)


@pytest.mark.parametrize("name", [SETTINGS, WEIGHTS])
def test_a_pipe_is_refused_and_does_not_block(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(AdapterError, match="is not a regular file"):
        read(adapter)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "header describes": lambda path: header(
        path, 3 << 30, A=("F32", [2, 8], 64), B=("F32", [8, 2], 64)
    ),
    "expected 1 to 3 sizes of 1 to": lambda path: header(
        path, A=("F32", [2, 400_000_000], 3_200_000_000), B=("F32", [8, 2], 64)
    ),
    r"\(100000 dimensions\)": lambda path: header(
        path, A=("F32", [1] * 100_000, 4), B=("F32", [8, 2], 64)
    ),
    r"has shape \[0, 4611686018427387904\]": lambda path: header(
        path, A=("F32", [0, 1 << 62], 0), B=("F32", [8, 2], 64)
    ),
    "is F8_E4M3, expected one of F64": lambda path: header(
        path, A=("F8_E4M3", [2, 8], 16), B=("F32", [8, 2], 64)
    ),
    "has dtype 'F4'": lambda path: header(path, A=("F4", [2, 8], 8), B=("F32", [8, 2], 64)),
    "lora_B of 'q_proj' is missing": lambda path: header(path, A=("F32", [2, 8], 64)),
    r"expected \(rank, in\) and \(out, rank\)": lambda path: header(
        path, A=("F32", [2, 8], 64), B=("F32", [8, 3], 96)
    ),
    "peft_type 'IA3', expected 'LORA'": lambda path: settings(path, peft_type="IA3"),
    "which is not one of its target_modules": lambda path: settings(
        path, target_modules=["v_proj"]
    ),
    "target_modules without tensors: v_proj": lambda path: settings(
        path, target_modules=["q_proj", "v_proj"]
    ),
    "has more than 1048576 bytes": lambda path: settings(path, filler="x" * (1 << 20)),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_damage_is_refused_with_its_reason(adapter: Path, reason: str) -> None:
    DAMAGES[reason](adapter)
    with pytest.raises(AdapterError, match=reason) as refused:
        read(adapter)
    assert len(refused.value.message) < 1000


def test_another_base_is_refused_unless_a_probe_can_tell(adapter: Path, tmp_path: Path) -> None:
    def check(base: str, *served: str, has_probe: bool = False) -> str | None:
        settings(adapter, base_model_name_or_path=base)
        return AdapterFiles.read(adapter).check_base(served, has_probe=has_probe)

    with pytest.raises(AdapterError, match="was trained on 'org/other', and 'org/base' is served"):
        check("org/other", "org/base")
    assert "the probe decides" in str(check("org/other", "org/base", has_probe=True))
    assert check("org/base", "org/base") is None
    assert check("/cache/models--org--base/snapshots/0123", "org/base") is None
    assert check("/models/tiny/", "tiny", "/srv/tiny") is None
    assert "nothing compares the two" in str(check("/runs/step_5", "tiny", "/srv/tiny"))
    assert check("", "tiny") is None
    for name, width in (("one", 128), ("two", 256)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": width}))
    with pytest.raises(AdapterError, match="hidden_size is 128, served is 256"):
        check(str(tmp_path / "one"), "model", str(tmp_path / "two"), has_probe=True)
