"""A checkpoint is validated before any worker hears of it: whole, in its place, and fitting."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.checkpoint import validate as module
from lockstep.checkpoint.manifest import begin
from lockstep.checkpoint.probe import Probe
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.validate import (
    Checkpoint,
    ModelSignature,
    TensorShape,
    mark_stable,
    resolve,
    write_manifest,
)
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict, Forbidden
from tests.checkpoint import weights_on_disk as disk

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING, QUERY, DOWN, NORM = disk.NAMES


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def whole(root: Path) -> Path:
    return disk.write(root / "step-1")


@pytest.fixture
def sharded(root: Path) -> Path:
    return disk.write_sharded(root / "step-2")


@pytest.fixture
def like(whole: Path) -> ModelSignature:
    return ModelSignature.of(whole)


# Where it is


@pytest.mark.failure_mode("F33")
@pytest.mark.parametrize("path", ["", "step-1", "./step-1", "../root/step-1", "/a\0b", "/\ud800"])
def test_a_path_that_cannot_be_meant_is_a_bad_request(root: Path, path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        resolve(path, [root])
    assert caught.value.status == 400
    assert caught.value.param == "weight_dir"
    assert repr(path) in str(caught.value)


@pytest.mark.failure_mode("F33")
def test_a_path_outside_the_roots_is_forbidden_whether_or_not_it_exists(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "root-2").mkdir()
    for path in (tmp_path, tmp_path / "other", tmp_path / "root-2", tmp_path / "none", Path("/")):
        with pytest.raises(Forbidden) as caught:
            resolve(str(path), [root])
        assert caught.value.status == 403
    with pytest.raises(Forbidden, match="other"):
        resolve(f"{root}/../other", [root])
    with pytest.raises(Forbidden, match="there are none"):
        resolve(str(root), [])


@pytest.mark.failure_mode("F33")
def test_a_symlink_out_of_the_roots_is_forbidden(root: Path, tmp_path: Path) -> None:
    outside = disk.write(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "up").symlink_to("..")
    for path in (root / "link", root / "up" / "outside"):
        with pytest.raises(Forbidden, match="outside"):
            resolve(str(path), [root])


@pytest.mark.failure_mode("F33")
def test_a_path_that_is_no_directory_is_refused(root: Path) -> None:
    (root / "file").write_text("")
    (root / "loop").symlink_to("loop")
    for name in ("file", "none", "loop", "file/below", "x" * 5000):
        with pytest.raises(CheckpointError) as caught:
            resolve(str(root / name), [root])
        assert caught.value.status == 422
        assert caught.value.param == "weight_dir"


def test_a_path_inside_the_roots_is_found_through_links(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "also").symlink_to(whole.parent)
    (whole.parent / "latest").symlink_to(whole)
    assert resolve(str(whole), [tmp_path / "none", tmp_path / "also"]) == whole
    assert resolve(str(whole.parent / "latest"), [whole.parent]) == whole


@pytest.mark.failure_mode("F33")
def test_a_weight_file_that_is_a_symlink_out_of_the_roots_is_forbidden(
    whole: Path, tmp_path: Path
) -> None:
    """As in a hub cache, where files are links: allowed, as long as they stay inside."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    os.rename(whole / SINGLE, blobs / "abc")
    (whole / SINGLE).symlink_to(blobs / "abc")
    with pytest.raises(Forbidden, match=SINGLE):
        Checkpoint.validate(whole, roots=[whole.parent])
    assert Checkpoint.validate(whole, roots=[tmp_path]).path == whole


# What is in it


def test_a_good_checkpoint_says_what_it_is(
    whole: Path, sharded: Path, like: ModelSignature
) -> None:
    checkpoint = Checkpoint.validate(whole, like)
    assert checkpoint.path == whole
    assert checkpoint.signature == like == ModelSignature.of(sharded)
    assert checkpoint.signature.tensors[NORM] == TensorShape((disk.WIDTH,), "F32")
    assert checkpoint.nbytes == sum(array.nbytes for array in disk.tensors().values())
    assert checkpoint.probe is None


def test_the_digest_is_that_of_the_contents(whole: Path, sharded: Path, root: Path) -> None:
    digest = Checkpoint.validate(whole).digest
    assert Checkpoint.validate(sharded).digest == digest
    for name in disk.NAMES:
        changed = disk.tensors()
        changed[name].reshape(-1)[-1] *= 1 + 1e-6
        assert Checkpoint.validate(disk.write(root / name, changed)).digest != digest
    swapped = disk.tensors()
    swapped[QUERY], swapped[DOWN] = swapped[DOWN], swapped[QUERY]
    assert Checkpoint.validate(disk.write(root / "swapped", swapped)).digest != digest


def test_another_precision_fits_the_served_model(root: Path, like: ModelSignature) -> None:
    wide = {name: array.astype("<f8") for name, array in disk.tensors().items()}
    assert Checkpoint.validate(disk.write(root / "wide", wide), like)


def bits(value: int, dtype: str) -> Callable[[Path], None]:
    """Makes the norm a tensor of that type, whose last value is `value`."""

    def change(path: Path) -> None:
        size = {"BF16": 2, "F16": 2, "F8_E5M2": 1, "F8_E4M3": 1, "F64": 8}[dtype]

        def narrow(header: disk.Header) -> None:
            entry = header[NORM]
            start, end = entry["data_offsets"]
            entry["shape"] = [(end - start) // size]
            entry["dtype"] = dtype

        disk.edit(path / SINGLE, narrow)
        header, data = disk.parts(path / SINGLE)
        disk.join(path / SINGLE, header, data[:-size] + value.to_bytes(size, "little"))

    return change


BAD_BITS = [
    ("BF16", 0x7F80), ("BF16", 0xFF80), ("BF16", 0x7FC0), ("BF16", 0xFFFF), ("F16", 0x7C00),
    ("F16", 0xFE01), ("F8_E5M2", 0x7C), ("F8_E4M3", 0xFF), ("F64", 0x7FF0 << 48),
]  # fmt: skip
GOOD_BITS = [
    ("BF16", 0x7F7F), ("BF16", 0xFF7F), ("F16", 0x7BFF), ("F8_E5M2", 0xFB), ("F8_E4M3", 0x7E),
    ("F64", 0x7FEF << 48),
]  # fmt: skip


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize(("dtype", "value"), BAD_BITS)
def test_what_is_no_number_is_refused_in_every_type(whole: Path, dtype: str, value: int) -> None:
    bits(value, dtype)(whole)
    with pytest.raises(CheckpointError, match=rf"{NORM}.*NaN or infinite"):
        Checkpoint.validate(whole)


@pytest.mark.parametrize(("dtype", "value"), GOOD_BITS)
def test_the_largest_number_of_a_type_is_a_number(whole: Path, dtype: str, value: int) -> None:
    disk.write(whole, {NORM: np.zeros(disk.WIDTH, "<f4")})
    bits(value, dtype)(whole)
    assert Checkpoint.validate(whole)


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", disk.NAMES)
def test_a_single_bad_value_anywhere_is_refused(root: Path, name: str, value: float) -> None:
    arrays = disk.tensors()
    arrays[name].reshape(-1)[3] = value
    with pytest.raises(CheckpointError, match=rf"{name}.* value 3 of {arrays[name].size}"):
        Checkpoint.validate(disk.write(root / "bad", arrays))


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize("at", [65_535, 65_536, 131_072, 140_000])
def test_a_bad_value_in_a_later_chunk_is_found_and_placed(root: Path, at: int) -> None:
    array = np.zeros(140_001, "<f4")
    array[at] = np.nan
    with pytest.raises(CheckpointError, match=rf" value {at} of 140001"):
        Checkpoint.validate(disk.write(root / "bad", {"before": np.zeros(3, "<f4"), "x": array}))


def reshape(header: disk.Header) -> None:
    header[EMBEDDING]["shape"].reverse()


def integers(header: disk.Header) -> None:
    header[QUERY]["dtype"] = "I32"


def eight_bits(header: disk.Header) -> None:
    header[QUERY] |= {"dtype": "F8_E4M3", "shape": [disk.WIDTH, disk.WIDTH * 4]}


def another_name(header: disk.Header) -> disk.Header:
    return {("extra" if name == QUERY else name): entry for name, entry in header.items()}


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (reshape, rf"{EMBEDDING}.*\[8, 16\], expected F32 \[16, 8\]"),
        (integers, f"{QUERY}.*I32"),
        (eight_bits, f"{QUERY}.*F8"),
        (another_name, f"lacks tensor '{QUERY}'"),
    ],
)
def test_another_model_is_refused(
    whole: Path,
    like: ModelSignature,
    change: Callable[[disk.Header], disk.Header | None],
    says: str,
) -> None:
    disk.edit(whole / SINGLE, change)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.validate(whole, like)


@pytest.mark.failure_mode("F34")
def test_missing_and_extra_tensors_are_named(root: Path, like: ModelSignature) -> None:
    few, many = disk.tensors(), disk.tensors()
    del few[DOWN]
    many["model.layers.1.mlp.down_proj.weight"] = few[NORM]
    with pytest.raises(CheckpointError, match=f"lacks tensor '{DOWN}'"):
        Checkpoint.validate(disk.write(root / "few", few), like)
    with pytest.raises(CheckpointError, match=r"has tensor 'model.layers.1"):
        Checkpoint.validate(disk.write(root / "many", many), like)


def test_a_tied_head_may_be_there_if_it_is_the_embedding(root: Path, like: ModelSignature) -> None:
    arrays = disk.tensors()
    arrays["lm_head.weight"] = arrays[EMBEDDING]
    with_head = disk.write(root / "head", arrays)
    assert Checkpoint.validate(with_head, like)
    assert Checkpoint.validate(disk.write(root / "none"), ModelSignature.of(with_head))


@pytest.mark.failure_mode("F28")
def test_a_stale_tied_head_is_refused(root: Path, like: ModelSignature) -> None:
    arrays = disk.tensors()
    arrays["lm_head.weight"] = disk.tensors(seed=1)[EMBEDDING]
    with pytest.raises(CheckpointError, match="lm_head"):
        Checkpoint.validate(disk.write(root / "stale", arrays), like)


def test_an_untied_head_must_be_there(root: Path) -> None:
    arrays = disk.tensors()
    arrays["lm_head.weight"] = disk.tensors(seed=1)[EMBEDDING]
    untied = disk.write(root / "untied", arrays)
    disk.configure(untied, tied=False)
    like = ModelSignature.of(untied)
    assert Checkpoint.validate(untied, like)
    with pytest.raises(CheckpointError, match="lacks tensor 'lm_head"):
        Checkpoint.validate(disk.write(root / "headless"), like)


# Whether all of it is there


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize("name", [disk.FIRST, disk.SECOND, INDEX])
def test_a_missing_file_is_refused(sharded: Path, name: str) -> None:
    (sharded / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        Checkpoint.validate(sharded)


@pytest.mark.failure_mode("F34")
def test_an_empty_directory_and_a_missing_one_are_refused(root: Path) -> None:
    for path in (root, root / "none"):
        with pytest.raises(CheckpointError, match=path.name):
            Checkpoint.validate(path)


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize("cut", [1, 4, 100, 10_000])
def test_a_file_that_is_cut_or_too_long_is_refused(whole: Path, cut: int) -> None:
    raw = (whole / SINGLE).read_bytes()
    for broken in (raw[:-cut], raw + b"\0" * cut):
        (whole / SINGLE).write_bytes(broken)
        with pytest.raises(CheckpointError, match=SINGLE):
            Checkpoint.validate(whole)


HEADERS = [
    b"", b"\0", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"x": 1}', b'{"x": null}', b'{"x": {}}',
    b'{"__metadata__": {"a": 1}}', b'{"a": 1, "a": 1}',
    b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}}',
    b'{"x":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}',
    b'{"x":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
    b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
    b'{"x":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    b'{"x":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
    b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
    b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    b'{"x":{"dtype":"F32","shape":[99999999999999999999,99999999999],"data_offsets":[0,4]}}',
    b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
]  # fmt: skip


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header[:40].decode("latin-1"))
def test_a_header_that_is_not_sound_is_refused(root: Path, header: bytes) -> None:
    disk.join(root / SINGLE, header, b"\0" * 4)
    with pytest.raises(CheckpointError, match=SINGLE):
        Checkpoint.validate(root)


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize(
    "places",
    [
        None, [], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {NORM: 1}},
        {"weight_map": {NORM: "../other/model.safetensors"}}, {"weight_map": {NORM: ""}},
        {"weight_map": {NORM: "/etc/passwd"}}, {"weight_map": {NORM: "a\0b"}},
        {"weight_map": {NORM: ".."}}, {"weight_map": {NORM: "\ud800"}},
        {"weight_map": {NORM: disk.SECOND}}, {"weight_map": dict.fromkeys(disk.NAMES, disk.FIRST)},
    ],
)  # fmt: skip
def test_an_index_that_is_not_sound_is_refused(sharded: Path, places: object) -> None:
    (sharded / INDEX).write_text(json.dumps(places))
    with pytest.raises(CheckpointError):
        Checkpoint.validate(sharded)


@pytest.mark.failure_mode("F34")
def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    (sharded / disk.SECOND).write_bytes((sharded / disk.FIRST).read_bytes())
    with pytest.raises(CheckpointError):
        Checkpoint.validate(sharded)


def test_a_single_file_beside_shards_is_refused_as_nobody_knows_which_counts(sharded: Path) -> None:
    (sharded / SINGLE).write_bytes((sharded / disk.FIRST).read_bytes())
    with pytest.raises(CheckpointError, match="both"):
        Checkpoint.validate(sharded)


@pytest.mark.failure_mode("F34")
def test_a_pipe_in_place_of_a_file_is_refused_and_does_not_hang(root: Path) -> None:
    os.mkfifo(root / SINGLE)
    with pytest.raises(CheckpointError, match="regular file"):
        Checkpoint.validate(root)


# Whether its writer has finished


@pytest.mark.failure_mode("F34")
def test_a_directory_that_is_being_written_is_refused(root: Path) -> None:
    begin(root / "new")
    disk.write(root / "new")
    with pytest.raises(CheckpointError, match=r"\.writing"):
        Checkpoint.validate(root / "new")
    write_manifest(root / "new")
    (root / "new" / ".writing").unlink()
    with pytest.raises(CheckpointError, match="STABLE"):
        Checkpoint.validate(root / "new")
    mark_stable(root / "new")
    assert Checkpoint.validate(root / "new", verify_hashes=True)
    with pytest.raises(Conflict, match="STABLE"):
        begin(root / "new")


def test_a_checkpoint_without_manifest_needs_no_marker(whole: Path) -> None:
    assert Checkpoint.validate(whole)
    mark_stable(whole)
    assert Checkpoint.validate(whole)


@pytest.fixture
def listed(sharded: Path) -> Path:
    write_manifest(sharded)
    mark_stable(sharded)
    return sharded


@pytest.mark.failure_mode("F34")
def test_a_file_of_another_size_than_the_manifest_says_is_refused(listed: Path) -> None:
    disk.edit(listed / disk.FIRST, lambda header: header | {"__metadata__": {"a": "b"}})
    with pytest.raises(CheckpointError, match=r"manifest\.json says"):
        Checkpoint.validate(listed)


@pytest.mark.failure_mode("F34")
def test_other_contents_than_the_manifest_says_are_refused_where_hashes_are_asked_for(
    listed: Path,
) -> None:
    header, data = disk.parts(listed / disk.FIRST)
    disk.join(listed / disk.FIRST, header, data[:-4] + b"\0" * 4)
    assert Checkpoint.validate(listed)
    with pytest.raises(CheckpointError, match="SHA-256"):
        Checkpoint.validate(listed, verify_hashes=True)


@pytest.mark.failure_mode("F34")
def test_a_file_that_the_manifest_does_not_know_is_refused(listed: Path) -> None:
    Probe(((1, 2),), ((-1.0,),), 0.0).write(listed / "probe.safetensors")
    with pytest.raises(CheckpointError, match=r"probe\.safetensors is not in manifest"):
        Checkpoint.validate(listed)


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize(
    "files", [None, {"../x": {"size": 1, "sha256": ""}}, {"x": 1}, {"x": {"size": "1"}}]
)
def test_a_manifest_that_is_not_sound_is_refused(listed: Path, files: object) -> None:
    text = json.dumps({"format": "lockstep-manifest-1", "files": files})
    (listed / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Checkpoint.validate(listed)


@pytest.mark.failure_mode("F34")
def test_nothing_is_marked_stable_that_is_not_what_was_listed(whole: Path) -> None:
    write_manifest(whole)
    (whole / SINGLE).write_bytes(b"")
    with pytest.raises(CheckpointError):
        mark_stable(whole)
    assert not (whole / "STABLE").exists()


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize("change", ["append", "replace", "add", "remove", "cut"])
def test_a_directory_that_changes_while_it_is_read_is_refused(
    whole: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    scan = module.digests

    def meddled(reader: CheckpointReader, odd: list[str]) -> dict[str, str]:
        (file,) = reader.files
        raw = file.read_bytes()
        match change:
            case "append":
                file.write_bytes(raw + b"x")
            case "replace":
                (whole / "new").write_bytes(raw)
                os.replace(whole / "new", file)
            case "add":
                (whole / "tokenizer.json").write_text("{}")
            case "remove":
                file.unlink()
            case "cut":
                file.write_bytes(raw[:-8])
        return scan(reader, odd)

    monkeypatch.setattr(module, "digests", meddled)
    with pytest.raises(CheckpointError):
        Checkpoint.validate(whole)


def test_a_probe_is_validated_with_its_checkpoint(whole: Path) -> None:
    probe = Probe(((1, disk.ROWS - 1),), ((-1.0,),), 0.0, version="step-1")
    probe.write(whole / "probe.safetensors")
    assert Checkpoint.validate(whole).probe == probe
    Probe(((1, disk.ROWS),), ((-1.0,),), 0.0).write(whole / "probe.safetensors")
    with pytest.raises(CheckpointError, match=f"token id {disk.ROWS}"):
        Checkpoint.validate(whole)
    (whole / "probe.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="probe"):
        Checkpoint.validate(whole)


def test_a_large_file_is_read_in_little_memory(root: Path) -> None:
    size = 64 << 20
    header = {"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    disk.join(root / SINGLE, json.dumps(header).encode(), b"")
    os.truncate(root / SINGLE, (root / SINGLE).stat().st_size + size)
    tracemalloc.start()
    try:
        assert Checkpoint.validate(root).nbytes == size
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_weights_that_can_hardly_be_meant_are_named_and_left_to_the_proof(root: Path) -> None:
    zeros, huge, bias = disk.tensors(), disk.tensors(), disk.tensors()
    zeros[QUERY][:] = 0
    huge[DOWN][3, 3] = 3e38
    bias[NORM][:] = 0
    assert Checkpoint.validate(disk.write(root / "good")).warnings == ()
    assert Checkpoint.validate(disk.write(root / "bias", bias)).warnings == ()
    (warning,) = Checkpoint.validate(disk.write(root / "zeros", zeros)).warnings
    assert warning == f"tensor {QUERY!r} of {SINGLE} holds nothing but zeros"
    (warning,) = Checkpoint.validate(disk.write(root / "huge", huge)).warnings
    assert warning == f"tensor {DOWN!r} of {SINGLE} holds values beyond 1e30"
