"""What each rank writes of its tensors: together all values, each once, whatever the sharding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.probe import Probe
from lockstep.checkpoint.sliced_writer import begin_attempt, finish
from lockstep.engine.sharded import Shard, parts, save_tensors
from lockstep.engine.sharded.part_writer import write_parts
from lockstep.engine.sharded.parts import parts_of_tensors
from lockstep.engine.sharded.ranks import Ranks
from lockstep.engine.weights.read import read_tensor
from lockstep.tokens.errors import BadRequest, CheckpointError

Yielded = list[tuple[str, Shard | None, Tensor]]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


def rank_of(rank: int, count: int) -> Ranks:
    ranks = Ranks(60.0)
    ranks.rank, ranks.count = rank, count
    return ranks


def written(
    directory: Path, yielded: list[Yielded], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors of a checkpoint to which rank r wrote what `yielded[r]` holds."""
    attempt = begin_attempt(directory)
    for rank, tensors in enumerate(yielded):
        own = rank_of(rank, len(yielded))
        record = write_parts(
            parts_of_tensors(tensors, own), directory, own,
            attempt=attempt, version="7", dtype=dtype,
        )  # fmt: skip
        record.write(directory)
    finish(directory, len(yielded), attempt, seconds=0)
    reader = open_checkpoint(directory)
    return {name: read_tensor(reader, name) for name in reader.tensors}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[Yielded]]:
    """Tensors, and what each rank has of them: rows or columns, uneven, empty, or copies."""
    count = draw(st.integers(1, 4))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors: dict[str, Tensor] = {}
    yielded: list[Yielded] = [[] for _ in range(count)]
    for at in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.integers(0, 9), min_size=0, max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        tensor = (torch.randn(shape, generator=noise) * 100).to(dtype)
        name = f"t{at}"
        tensors[name] = tensor
        axis = draw(st.integers(-1, len(shape) - 1))
        if axis < 0:
            for own in yielded:
                own.append((name, None, tensor))
            continue
        # As torch.chunk cuts, so that the last ranks have less, or nothing.
        step = max(-(-shape[axis] // count), 1)
        for rank, own in enumerate(yielded):
            start, end = (min(at * step, shape[axis]) for at in (rank, rank + 1))
            local = tensor.narrow(axis, start, end - start)
            offsets = [0] * len(shape)
            offsets[axis] = start
            own.append((name, Shard(tuple(offsets), tuple(shape)), local))
    return tensors, yielded


@given(layout=layouts(), cast=st.booleans(), split=st.sampled_from([1, 64, 1 << 20]))
@settings(max_examples=60, deadline=None)
def test_any_layout_is_read_as_the_whole_tensors(
    layout: tuple[dict[str, Tensor], list[Yielded]],
    cast: bool,
    split: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensors, yielded = layout
    dtype = torch.bfloat16 if cast else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "SPLIT_BYTES", split)  # also tensors this small are split by rows
        read = written(tmp_path_factory.mktemp("any") / "c", yielded, dtype)
    assert set(read) == {name for name, tensor in tensors.items() if tensor.numel()}
    for name, tensor in read.items():
        expected = tensors[name].to(dtype) if cast and tensor.is_floating_point() else tensors[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_copies_are_written_by_all_ranks_row_by_row(tmp_path: Path) -> None:
    tensor = torch.arange(3 << 18, dtype=torch.float32).view(-1, 256)
    written(tmp_path / "c", [[("big", None, tensor), ("small", None, tensor[0])]] * 4)
    sizes = [os.path.getsize(tmp_path / "c" / f"rank-0000{rank}-00000.safetensors") for rank in
             range(4)]  # fmt: skip
    assert max(sizes) < 1.02 * min(sizes)


def test_an_iterator_is_written_as_it_comes(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.engine.sharded.part_writer.FILE_BYTES", 1 << 16)
    names: list[str] = []

    def export() -> object:
        for at in range(6):
            names.append(f"t{at}")
            # An exporter frees each tensor when it is asked for the next but few.
            files = len(list((tmp_path / "c").glob("rank-*.safetensors")))
            assert files >= (at * 40_000) // (1 << 16) - 1
            yield f"t{at}", None, torch.full((100, 100), float(at))

    scored: list[list[list[int]]] = []

    def score(sequences: list[list[int]]) -> list[list[float]]:
        scored.append(sequences)
        return [[-1.0] * (len(ids) - 1) for ids in sequences]

    path = save_tensors(export(), tmp_path / "c", model=tiny, score=score, version="9")
    reader = open_checkpoint(path)
    assert sorted(reader.tensors) == names
    assert len(list(path.glob("rank-*.safetensors"))) == 3
    probe = Probe.beside(path)
    assert probe is not None
    assert (probe.version, [list(ids) for ids in probe.sequences]) == ("9", scored[0])
    save_tensors(export(), tmp_path / "d", model=tiny, score=score, previous=probe)
    second = Probe.beside(tmp_path / "d")
    assert second is not None
    assert second.previous == probe.logprobs


@pytest.mark.failure_mode("F86")
def test_a_slice_that_is_claimed_twice_or_by_none_is_refused_by_name(tmp_path: Path) -> None:
    tensor = torch.ones(4, 2)
    half = Shard((0, 0), (4, 2))
    with pytest.raises(CheckpointError, match=r"\[0:2, 0:2\] of tensor 'w' was written by rank 1"):
        written(tmp_path / "twice", [[("w", half, tensor[:2])]] * 2)
    with pytest.raises(CheckpointError, match="4 of the 8 values of tensor 'w' are in no slice"):
        written(tmp_path / "none", [[("w", half, tensor[:2])], []])
    with pytest.raises(BadRequest, match=r"rank 1 has shape \[4, 2\] at offsets \[1, 0\]"):
        written(tmp_path / "out", [[], [("w", Shard((1, 0), (4, 2)), tensor)]])
    with pytest.raises(BadRequest, match=r"'w' of rank 0 has 2 dimensions, but .* offsets \[0\]"):
        written(tmp_path / "flat", [[("w", Shard((0,), (4,)), tensor)]])
