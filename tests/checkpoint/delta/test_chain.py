"""A delta is read with its chain, bit for bit, or refused with the name of the link."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.delta.convert import make_delta, write_full
from lockstep.checkpoint.delta.prune import prune
from lockstep.checkpoint.delta.record import DELTA, PAYLOADS, DeltaLink
from lockstep.checkpoint.manifest import Manifest, mark_stable, write_manifest
from lockstep.checkpoint.open import open_checkpoint, resolve_checkpoint
from lockstep.checkpoint.validate import Checkpoint
from lockstep.tokens.errors import CheckpointError, Forbidden
from tests.checkpoint import slices_on_disk, weights_on_disk
from tests.checkpoint.delta.deltas_on_disk import Arrays, chain, full, moved, same
from tests.checkpoint.weights_on_disk import NAMES


def resign(directory: Path) -> None:
    """Write a manifest that lists the files as they are now, as an attacker could."""
    manifest = Manifest.read(directory)
    assert manifest is not None
    write_manifest(directory, manifest.tensors)
    mark_stable(directory)


def edit(directory: Path, change: Callable[[dict], object]) -> None:
    path = directory / DELTA
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    resign(directory)


def test_every_link_is_the_full_checkpoint(tmp_path: Path) -> None:
    paths, contents = chain(tmp_path, 4)
    for path, arrays in zip(paths, contents, strict=True):
        assert same(path, arrays)
        validated = Checkpoint.validate(path, verify_hashes=True)
        whole = Checkpoint.validate(full(tmp_path / "again" / path.name, arrays))
        assert (validated.digest, validated.tensors) == (whole.digest, whole.tensors)
    summary = Checkpoint.validate(paths[4]).delta
    assert summary is not None
    assert (summary.base, summary.depth) == ("step-3", 4)
    assert 0 < summary.nbytes < summary.full_bytes
    assert 0 < summary.changed < summary.values


@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_any_tensors_and_edits_survive(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    parent = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=3)
    )
    dtypes = [data.draw(st.sampled_from(["<f4", "<f8", "<i8"])) for _ in shapes]
    arrays: Arrays = {
        f"t{at}": (rng.standard_normal(shape) * 100).astype(dtype)
        for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    }
    path = full(parent / "0", arrays)
    for step in range(1, data.draw(st.integers(1, 3)) + 1):
        share = data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
        arrays = {n: np.where(rng.random(a.shape) < share, a * 2, a) for n, a in arrays.items()}
        new = parent / str(step)
        make_delta(full(parent / "full" / str(step), arrays), path, new)
        path = new
        assert same(path, arrays)


def test_a_delta_on_a_checkpoint_of_many_ranks(tmp_path: Path) -> None:
    arrays = weights_on_disk.tensors()
    cuts = slices_on_disk.rows_of(arrays, 3)
    base = slices_on_disk.write(tmp_path / "step-0", arrays, cuts)
    later = moved(arrays, 1)
    new = slices_on_disk.write(tmp_path / "new", later, slices_on_disk.rows_of(later, 2))
    make_delta(new, base, tmp_path / "step-1")
    assert same(tmp_path / "step-1", later)
    (base / "STABLE").unlink()
    shutil.rmtree(base)
    slices_on_disk.write(base, later, cuts, version="8")
    with pytest.raises(CheckpointError, match="another checkpoint than the base was"):
        open_checkpoint(tmp_path / "step-1")


def test_a_delta_is_written_in_full_again(tmp_path: Path) -> None:
    paths, contents = chain(tmp_path, 2)
    write_full(paths[2], tmp_path / "elsewhere" / "whole")
    assert same(tmp_path / "elsewhere" / "whole", contents[2])
    assert Checkpoint.validate(tmp_path / "elsewhere" / "whole").digest == (
        Checkpoint.validate(paths[2]).digest
    )


@pytest.mark.failure_mode("F89")
def test_a_missing_link_is_named(tmp_path: Path) -> None:
    paths, _ = chain(tmp_path, 3)
    shutil.rmtree(paths[1])
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(paths[3])
    assert "its link 'step-2' is based on version 'step-1' in 'step-1', but" in str(error.value)
    assert "step-1 does not exist" in str(error.value)


@pytest.mark.failure_mode("F89")
def test_a_full_checkpoint_of_the_same_weights_stands_in_for_a_link(tmp_path: Path) -> None:
    paths, contents = chain(tmp_path, 3)
    write_full(paths[2], tmp_path / "saved")
    shutil.rmtree(paths[1])
    assert same(paths[3], contents[3])
    shutil.rmtree(paths[2])
    assert same(paths[3], contents[3])


@pytest.mark.failure_mode("F63")
def test_swapped_links_are_refused(tmp_path: Path) -> None:
    paths, _ = chain(tmp_path, 3)
    paths[1].rename(tmp_path / "x")
    paths[2].rename(paths[1])
    (tmp_path / "x").rename(paths[2])
    with pytest.raises(CheckpointError, match=r"link 'step-3' .* links were swapped"):
        open_checkpoint(paths[3])


@pytest.mark.failure_mode("F63")
def test_a_foreign_base_is_refused(tmp_path: Path) -> None:
    paths, contents = chain(tmp_path, 1)
    shutil.rmtree(paths[0])
    full(paths[0], moved(contents[0], 9))
    with pytest.raises(CheckpointError, match=r"step-0 holds weights sha256:\w+, expected"):
        open_checkpoint(paths[1])


@pytest.mark.failure_mode("F63")
def test_a_base_whose_bytes_changed_is_found_at_the_result(tmp_path: Path) -> None:
    paths, contents = chain(tmp_path, 2)
    other = contents[0] | {NAMES[0]: contents[0][NAMES[0]] + 1}
    weights_on_disk.write(paths[0], other)
    with pytest.raises(
        CheckpointError, match=rf"'{NAMES[0]}' is not what was written after link 'step-1'"
    ):
        open_checkpoint(paths[2]).array(NAMES[0])
    assert open_checkpoint(paths[2]).array(NAMES[3]).tobytes() == contents[2][NAMES[3]].tobytes()


@pytest.mark.failure_mode("F63")
def test_a_cycle_is_refused(tmp_path: Path) -> None:
    paths, _ = chain(tmp_path, 2)
    digest = DeltaLink.read(paths[2]).record.digest
    edit(paths[1], lambda record: record["base"].update(directory="step-2", digest=digest))
    with pytest.raises(CheckpointError, match="the chain is a cycle"):
        open_checkpoint(paths[2])


@pytest.mark.parametrize("seed", range(12))
def test_any_flipped_bit_is_found(tmp_path: Path, seed: int) -> None:
    paths, _ = chain(tmp_path, 1)
    rng = np.random.default_rng(seed)
    path = paths[1] / [PAYLOADS, DELTA][seed % 2]
    data = bytearray(path.read_bytes())
    at = int(rng.integers(len(data)))
    data[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        Checkpoint.validate(paths[1])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda r: r["tensors"][NAMES[0]].update(changed=10**9), "1000000000 of 128 values"),
        (lambda r: r["tensors"][NAMES[0]].update(changed=1), f"payload of tensor '{NAMES[0]}' in"),
        (lambda r: r["tensors"][NAMES[0]].update(gap_bytes=3), "with gaps of 3 bytes"),
        (lambda r: r["tensors"][NAMES[0]].update(shape=[8, 16]), r"is F32 \[8, 16\] in link"),
        (lambda r: r["tensors"][NAMES[0]].update(dtype="BF16"), r"is BF16 \[16, 8\] in link"),
        (lambda r: r["tensors"][NAMES[0]].update(encoding="same"), "has a payload, but did not"),
        (lambda r: r["tensors"][NAMES[0]].update(check="00"), "is not what was written after"),
        (lambda r: r["tensors"].pop(NAMES[0]), "list different tensors"),
        (lambda r: r.update(digest="sha256:0"), "has digest 'sha256:0'"),
        (lambda r: r.update(depth=0), "depth 0: expected 1"),
        (lambda r: r["base"].update(directory="../elsewhere"), "not a file beside it"),
        (lambda r: r.update(format="x"), "format 'x'"),
    ],
)
def test_a_broken_record_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict], object], problem: str
) -> None:
    paths, _ = chain(tmp_path, 1)
    edit(paths[1], change)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(paths[1]).array(NAMES[0])


def test_a_delta_has_the_shapes_of_its_base(tmp_path: Path) -> None:
    arrays = weights_on_disk.tensors()
    base = full(tmp_path / "0", arrays)
    other = full(tmp_path / "1", arrays | {NAMES[3]: np.zeros(9, "<f4")})
    with pytest.raises(CheckpointError, match=rf"'{re.escape(NAMES[3])}' is F32 \[9\], but F32"):
        make_delta(other, base, tmp_path / "2")
    with pytest.raises(CheckpointError, match="both need the same parent"):
        make_delta(other, base, tmp_path / "below" / "2")


def test_a_chain_does_not_leave_the_roots(tmp_path: Path) -> None:
    paths, _ = chain(tmp_path, 1)
    assert resolve_checkpoint(str(paths[1]), [tmp_path]) == paths[1]
    with pytest.raises(Forbidden, match=r"step-0, which .* is based on, is outside"):
        resolve_checkpoint(str(paths[1]), [paths[1]])
    with pytest.raises(Forbidden, match="outside"):
        Checkpoint.validate(paths[1], roots=[paths[1]])


@pytest.mark.failure_mode("F89")
def test_prune_keeps_what_a_chain_needs(tmp_path: Path) -> None:
    paths, contents = chain(tmp_path, 3)
    again = full(tmp_path / "step-4", contents[3])
    assert prune(tmp_path, [Path("step-3")], dry_run=True) == [again]
    assert again.exists()
    assert prune(tmp_path, [Path("step-3")]) == [again]
    assert same(paths[3], contents[3])
    shutil.rmtree(paths[1])
    with pytest.raises(CheckpointError, match="step-1 does not exist"):
        prune(tmp_path, [Path("step-3")])
    assert all(path.exists() for path in (paths[0], paths[2], paths[3]))
    with pytest.raises(CheckpointError, match="nothing was deleted"):
        prune(tmp_path, [Path("step-9")])
