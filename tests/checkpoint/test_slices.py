"""A checkpoint in slices of many ranks is read as a whole one, or refused by name."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.manifest import MANIFEST, STABLE, FileRecord, Manifest, sha256_of
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.sliced_writer import (
    begin_attempt,
    finish,
    report_failure,
    wait_until_stable,
)
from lockstep.checkpoint.slices import Box, RankRecord, rank_file
from lockstep.checkpoint.validate import Checkpoint, ModelSignature
from lockstep.tokens.errors import CheckpointError
from tests.checkpoint import slices_on_disk, weights_on_disk
from tests.checkpoint.slices_on_disk import record_of, rows_of
from tests.checkpoint.weights_on_disk import NAMES


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_a_sliced_checkpoint_is_validated_as_the_whole_one(tmp_path: Path, ranks: int) -> None:
    arrays = weights_on_disk.tensors()
    whole = Checkpoint.validate(weights_on_disk.write(tmp_path / "whole"))
    path = slices_on_disk.write(tmp_path / "sliced", arrays, rows_of(arrays, ranks))
    sliced = Checkpoint.validate(path, ModelSignature.of(tmp_path / "whole"), verify_hashes=True)
    assert (sliced.digest, sliced.tensors, sliced.nbytes) == (
        whole.digest, whole.tensors, whole.nbytes
    )  # fmt: skip
    reader = open_checkpoint(path)
    for name, array in arrays.items():
        assert reader.array(name).tobytes() == array.tobytes()


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a shape: cut again and again in any dimension."""
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(boxes) - 1))
        box = boxes[at]
        axes = [axis for axis, (start, end) in enumerate(box) if end - start > 1]
        if not axes:
            continue
        axis = draw(st.sampled_from(axes))
        where = draw(st.integers(box[axis][0] + 1, box[axis][1] - 1))
        low, high = list(box), list(box)
        low[axis], high[axis] = (box[axis][0], where), (where, box[axis][1])
        boxes[at : at + 1] = [tuple(low), tuple(high)]
    return boxes


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_tiling_survives_bit_for_bit(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    shapes = data.draw(
        st.lists(st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple), min_size=1,
                 max_size=3)
    )  # fmt: skip
    dtypes = [data.draw(st.sampled_from(["<f4", "<f8", "<i8"])) for _ in shapes]
    arrays = {
        f"t{at}": (rng.standard_normal(shape) * 100).astype(dtype)
        for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    count = data.draw(st.integers(1, 4))
    ranks: list[dict[str, list[Box]]] = [{} for _ in range(count)]
    for name, array in arrays.items():
        for box in data.draw(cut(array.shape)):
            ranks[data.draw(st.integers(0, count - 1))].setdefault(name, []).append(box)
    path = slices_on_disk.write(tmp_path_factory.mktemp("any") / "c", arrays, ranks)
    reader = open_checkpoint(path)
    assert set(reader.tensors) == set(arrays)
    for name, array in arrays.items():
        assert reader.array(name).tobytes() == array.tobytes()
        assert b"".join(bytes(part) for part in reader.parts(name)) == array.tobytes()
    file = data.draw(st.sampled_from([path for path in reader.files if path.suffix != ".json"]))
    at = data.draw(st.integers(0, file.stat().st_size - 1))
    flip(file, at, 1 << data.draw(st.integers(0, 7)))
    with pytest.raises(CheckpointError):
        Checkpoint.validate(path, verify_hashes=True)


def flip(path: Path, at: int, mask: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= mask
    path.write_bytes(raw)


def by_columns(path: Path) -> Path:
    arrays = weights_on_disk.tensors()
    wide = NAMES[0]
    ranks: list[dict[str, list[Box]]] = [
        {name: [tuple((0, size) for size in array.shape)] for name, array in arrays.items()},
        {wide: [((0, 16), (4, 8))]},
    ]
    ranks[0][wide] = [((0, 16), (0, 4))]
    return slices_on_disk.write(path, arrays, ranks)


@pytest.mark.parametrize("columns", [False, True])
def test_a_flipped_bit_is_found_by_validation_and_names_rank_and_slice(
    tmp_path: Path, columns: bool
) -> None:
    arrays = weights_on_disk.tensors()
    path = tmp_path / "c"
    if columns:
        by_columns(path)
    else:
        slices_on_disk.write(path, arrays, rows_of(arrays, 2))
    file = path / "rank-00001-00000.safetensors"
    flip(file, file.stat().st_size - 3, 1)
    with pytest.raises(CheckpointError, match=r"slice \[.*\] of tensor '.*', which rank 1 wrote"):
        Checkpoint.validate(path)


Change = Callable[[dict[str, object]], None]


def edited(path: Path, rank: int, change: Callable[[dict], None]) -> None:
    """Rewrites the record of a rank, and its line in the manifest."""
    file = path / rank_file(rank)
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][file.name] = {"size": file.stat().st_size, "sha256": sha256_of(file)}
    (path / MANIFEST).write_text(json.dumps(manifest))


def slices(raw: dict) -> list[dict]:
    return raw["tensors"][NAMES[0]]["slices"]


BROKEN: dict[str, tuple[Callable[[dict], object], str]] = {
    "another rank's slice": (
        lambda raw: slices(raw)[0].update(offsets=[0, 0]),
        r"slice \[0:8, 0:8\] of tensor 'model.embed_tokens.weight' was written by rank 1, and "
        r"overlaps \[0:8, 0:8\] of rank 0",
    ),
    "a missing slice": (
        lambda raw: raw["tensors"].pop(NAMES[0]),
        "64 of the 128 values of tensor 'model.embed_tokens.weight' are in no slice, the first are "
        "rows 8 to 15: rank 0 wrote",
    ),
    "another step": (lambda raw: raw.update(version="6"), "rank 1 wrote version '6', but rank 0"),
    "another attempt": (lambda raw: raw.update(attempt="ab"), "rank 1 .* in another attempt"),
    "another rank": (lambda raw: raw.update(rank=0), "rank-00001.json is of rank 0 of 2"),
    "another number of ranks": (lambda raw: raw.update(ranks=3), "is of rank 1 of 3"),
    "another shape": (
        lambda raw: raw["tensors"][NAMES[0]].update(shape=[32, 8]),
        "is F32 \\[32, 8\\] on rank 1, but F32 \\[16, 8\\] on rank 0",
    ),
    "another dtype": (
        lambda raw: raw["tensors"][NAMES[0]].update(dtype="BF16"),
        "is BF16 \\[16, 8\\] on rank 1, but F32",
    ),
    "out of the tensor": (
        lambda raw: slices(raw)[0].update(offsets=[9, 0]),
        r"offsets \[9, 0\] and sizes \[8, 8\], which is not inside",
    ),
    "negative": (lambda raw: slices(raw)[0].update(offsets=[-1, 0]), "`int` >= 0 .*offsets"),
    "too few dimensions": (lambda raw: slices(raw)[0].update(sizes=[8]), "sizes \\[8\\]"),
    "another file": (
        lambda raw: slices(raw)[0].update(file="x"),
        "a slice in 'x', not a file of the rank",
    ),
    "another directory": (
        lambda raw: raw["files"].update({"../x": {"size": 1, "sha256": ""}}),
        "which is not a file beside it",
    ),
    "another size": (
        lambda raw: slices(raw)[0].update(sizes=[7, 8]),
        "holds F32 \\[8, 8\\] of tensor .*, but rank 1 says F32 \\[7, 8\\]|are in no slice",
    ),
    "no digest": (lambda raw: slices(raw)[0].pop("digest"), "missing required field `digest`"),
    "no attempt": (lambda raw: raw.pop("attempt"), "missing required field `attempt`"),
    "no tensors": (lambda raw: raw.pop("tensors"), "missing required field `tensors`"),
    "another format": (lambda raw: raw.update(format="x"), "has format 'x'"),
}


@pytest.mark.failure_mode("F86")
@pytest.mark.parametrize("what", BROKEN)
def test_records_that_do_not_make_a_whole_are_refused_by_name(tmp_path: Path, what: str) -> None:
    arrays = weights_on_disk.tensors()
    path = slices_on_disk.write(tmp_path / "c", arrays, rows_of(arrays, 2))
    change, message = BROKEN[what]
    edited(path, 1, lambda raw: change(raw) and None)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.failure_mode("F86")
def test_a_record_or_file_that_is_gone_is_refused_by_rank(tmp_path: Path) -> None:
    arrays = weights_on_disk.tensors()
    path = slices_on_disk.write(tmp_path / "c", arrays, rows_of(arrays, 2))
    flip(path / rank_file(1), 3, 1)
    with pytest.raises(CheckpointError, match=r"rank-00001\.json is not the file that manifest"):
        open_checkpoint(path)
    (path / rank_file(1)).unlink()
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 has not written its slices"):
        open_checkpoint(path)
    other = slices_on_disk.write(tmp_path / "d", arrays, rows_of(arrays, 2))
    (other / "rank-00000-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the slices of rank 0 are not complete"):
        open_checkpoint(other)


@pytest.mark.failure_mode("F87")
def test_a_rank_that_never_writes_is_named_and_nothing_becomes_stable(tmp_path: Path) -> None:
    arrays = weights_on_disk.tensors()
    path, cuts = tmp_path / "c", rows_of(arrays, 3)
    attempt = begin_attempt(path)
    for rank in (0, 2):
        record_of(path, arrays, cuts[rank], rank, 3, attempt).write(path)
    waiting: list[str] = []

    def wait() -> None:
        try:
            wait_until_stable(path, 3, attempt, seconds=60)
        except CheckpointError as error:
            waiting.append(str(error))

    other = threading.Thread(target=wait)
    other.start()
    with pytest.raises(CheckpointError, match=r"rank 1 of 3 has not written its slices .* 0.2 s"):
        finish(path, 3, attempt, seconds=0.2)
    other.join(30)
    assert re.search("rank 0 of 3 could not write its part .* rank 1 of 3 has not", waiting[0])
    assert not (path / STABLE).exists()
    with pytest.raises(CheckpointError, match="is being written"):
        open_checkpoint(path)
    again = slices_on_disk.write(path, arrays, cuts)  # what was left is removed
    assert Manifest.read(again) is not None


@pytest.mark.failure_mode("F87")
def test_a_rank_that_fails_ends_the_others_at_once(tmp_path: Path) -> None:
    attempt = begin_attempt(tmp_path)
    report_failure(tmp_path, 1, "an earlier attempt", OSError("old"))
    with pytest.raises(CheckpointError, match="rank 0 of 2 has not written"):
        finish(tmp_path, 2, attempt, seconds=0)
    attempt = begin_attempt(tmp_path)
    arrays = weights_on_disk.tensors()
    record_of(tmp_path, arrays, rows_of(arrays, 2)[0], 0, 2, attempt).write(tmp_path)
    report_failure(tmp_path, 1, attempt, OSError("No space left on device"))
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 could not .* OSError: No space left"):
        finish(tmp_path, 2, attempt, seconds=60)


def test_a_record_of_an_earlier_attempt_is_not_taken(tmp_path: Path) -> None:
    arrays = weights_on_disk.tensors()
    cuts = rows_of(arrays, 2)
    attempt = begin_attempt(tmp_path)
    record_of(tmp_path, arrays, cuts[0], 0, 2, attempt).write(tmp_path)
    record_of(tmp_path, arrays, cuts[1], 1, 2, "of a process that was left over").write(tmp_path)
    with pytest.raises(CheckpointError, match="rank 1 of 2 has not written its slices"):
        finish(tmp_path, 2, attempt, seconds=0.1)


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    arrays = weights_on_disk.tensors()
    record = record_of(tmp_path, arrays, rows_of(arrays, 2)[1], 1, 2, "ab")
    record.write(tmp_path)
    again = RankRecord.read(tmp_path / rank_file(1))
    assert again == record
    assert all(isinstance(file, FileRecord) for file in again.files.values())
