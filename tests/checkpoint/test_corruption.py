"""Whatever is done to a good checkpoint, it does not validate, and the error is a typed one."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.validate import Checkpoint, ModelSignature, mark_stable, write_manifest
from lockstep.tokens.errors import CheckpointError
from tests.checkpoint import weights_on_disk as disk

Draw = Callable[[st.SearchStrategy[int]], int]
SHARDS = (disk.FIRST, disk.SECOND)
DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "U32", "I16", "U8", "BOOL", "F0")


def some_shard(draw: Draw, path: Path) -> Path:
    return path / SHARDS[draw(st.integers(0, 1))]


def flip_in_header(draw: Draw, path: Path) -> None:
    file = some_shard(draw, path)
    raw = bytearray(file.read_bytes())
    header, _ = disk.parts(file)
    # Behind it is padding, where another blank is as good.
    raw[draw(st.integers(0, 7 + len(header.rstrip())))] ^= draw(st.integers(1, 255))
    file.write_bytes(raw)


def cut(draw: Draw, path: Path) -> None:
    file = some_shard(draw, path)
    raw = file.read_bytes()
    file.write_bytes(raw[: draw(st.integers(0, len(raw) - 1))])


def lengthen(draw: Draw, path: Path) -> None:
    file = some_shard(draw, path)
    file.write_bytes(file.read_bytes() + b"\0" * draw(st.integers(1, 100)))


def delete(draw: Draw, path: Path) -> None:
    names = (*SHARDS, "model.safetensors.index.json")
    (path / names[draw(st.integers(0, 2))]).unlink()


def rename_tensor(draw: Draw, path: Path) -> None:
    def change(header: disk.Header) -> disk.Header:
        old = sorted(header)[draw(st.integers(0, len(header) - 1))]
        at, to = draw(st.integers(0, len(old) - 1)), chr(draw(st.integers(0, 0x10FFFF)))
        new = old[:at] + (to if to != old[at] else to + "x") + old[at + 1 :]
        return {(new if name == old else name): entry for name, entry in header.items()}

    disk.edit(some_shard(draw, path), change)


def change_dtype(draw: Draw, path: Path) -> None:
    def change(header: disk.Header) -> None:
        entry = header[sorted(header)[draw(st.integers(0, len(header) - 1))]]
        others = [dtype for dtype in DTYPES if dtype != entry["dtype"]]
        entry["dtype"] = others[draw(st.integers(0, len(others) - 1))]

    disk.edit(some_shard(draw, path), change)


def change_shape(draw: Draw, path: Path) -> None:
    def change(header: disk.Header) -> None:
        entry = header[sorted(header)[draw(st.integers(0, len(header) - 1))]]
        axis = draw(st.integers(0, len(entry["shape"]) - 1))
        entry["shape"][axis] += draw(st.integers(-5, 5).filter(bool))

    disk.edit(some_shard(draw, path), change)


def swap_offsets(draw: Draw, path: Path) -> None:
    def change(header: disk.Header) -> None:
        entry = header[sorted(header)[draw(st.integers(0, len(header) - 1))]]
        shift = draw(st.integers(-200, 200).filter(bool))
        entry["data_offsets"] = [offset + shift for offset in entry["data_offsets"]]

    disk.edit(some_shard(draw, path), change)


def no_number(draw: Draw, path: Path) -> None:
    file = some_shard(draw, path)
    header, data = disk.parts(file)
    values = np.frombuffer(data, "<u4").copy()
    sign, fraction = draw(st.integers(0, 1)), draw(st.integers(0, (1 << 23) - 1))
    values[draw(st.integers(0, len(values) - 1))] = sign << 31 | 0x7F80_0000 | fraction
    disk.join(file, header, values.tobytes())


def flip_in_index(draw: Draw, path: Path) -> None:
    file = path / "model.safetensors.index.json"
    places = json.loads(file.read_bytes())["weight_map"]
    name = sorted(places)[draw(st.integers(0, len(places) - 1))]
    if draw(st.integers(0, 1)):
        del places[name]
    else:
        places[name] = SHARDS[SHARDS.index(places[name]) - 1]
    file.write_text(json.dumps({"weight_map": places}))


def noise_for_json(draw: Draw, path: Path) -> None:
    file = path / "model.safetensors.index.json"
    file.write_bytes(bytes(draw(st.integers(0, 255)) for _ in range(draw(st.integers(0, 20)))))


CORRUPTIONS = (
    flip_in_header, cut, lengthen, delete, rename_tensor, change_dtype, change_shape, swap_offsets,
    no_number, flip_in_index, noise_for_json,
)  # fmt: skip


@cache
def pristine(*, manifest: bool) -> Path:
    """Made once and copied: a manifest waits for the disk."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path)
    disk.write_sharded(path)
    if manifest:
        write_manifest(path)
        mark_stable(path)
    Checkpoint.validate(path, ModelSignature.of(path), verify_hashes=True)
    return path


@pytest.mark.failure_mode("F34")
@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(CORRUPTIONS), st.sampled_from(["none", "sizes", "hashes"]))
def test_a_corrupted_checkpoint_never_validates(
    data: st.DataObject, corrupt: Callable[[Draw, Path], None], manifest: str
) -> None:
    path = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(pristine(manifest=manifest != "none"), path, dirs_exist_ok=True)
        like = ModelSignature.of(path)
        corrupt(data.draw, path)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.validate(path, like, verify_hashes=manifest == "hashes")
        assert caught.value.status == 422
        assert str(path) in str(caught.value)
    finally:
        shutil.rmtree(path)


@pytest.mark.failure_mode("F34")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_one_changed_byte_anywhere_is_seen_by_the_hashes(data: st.DataObject) -> None:
    path = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(pristine(manifest=True), path, dirs_exist_ok=True)
        names = (*SHARDS, "model.safetensors.index.json", "config.json")
        file = path / data.draw(st.sampled_from(names))
        raw = bytearray(file.read_bytes())
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        file.write_bytes(raw)
        with pytest.raises(CheckpointError):
            Checkpoint.validate(path, verify_hashes=True)
    finally:
        shutil.rmtree(path)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_noise_is_refused_with_a_typed_error(header: bytes, data: bytes) -> None:
    path = Path(tempfile.mkdtemp())
    try:
        disk.join(path / "model.safetensors", b"{" + header, data)
        with pytest.raises(CheckpointError):
            Checkpoint.validate(path)
    finally:
        shutil.rmtree(path)
