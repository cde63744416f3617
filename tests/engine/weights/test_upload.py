"""Copying of tensors to a device: all arrive with the right digests, or an error names one.

The device is the CPU here; threads copy in pieces as on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.weights import upload
from lockstep.engine.weights.digest import digest_of
from lockstep.engine.weights.packed import PackedTensors
from lockstep.engine.weights.upload import DeviceCopier
from lockstep.engine.weights.weights import Layout, Weights
from lockstep.tokens.errors import CheckpointError

SHAPES = {"a": (40, 7), "b": (3,), "c": (5, 2, 3), "d": (64, 64)}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PIECE", 64)
    monkeypatch.setattr(upload, "CHECKED", 100)


def sources(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(s, generator=generator).to(dtype) for name, s in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_tensor_arrives_with_the_digest_of_what_was_read(dtype: torch.dtype) -> None:
    packed = PackedTensors.empty(SHAPES, "cpu", torch.bfloat16, joined=True)
    tensors = sources(dtype)
    assert packed.whole is not None
    with DeviceCopier(packed.whole) as copier:
        for name, tensor in tensors.items():
            copier.fill(name, packed[name], tensor)
        copier.read("beside", tensors["d"])
        digests = copier.finish()
    for name, tensor in tensors.items():
        assert torch.equal(packed[name], tensor.to(torch.bfloat16)), name
        assert digests.pop(name) == digest_of(tensor)
    assert digests == {"beside": digest_of(tensors["d"])}


@pytest.mark.failure_mode("F34")
def test_a_value_that_overflows_in_the_target_dtype_is_named() -> None:
    packed = PackedTensors.empty(SHAPES, "cpu", torch.float16, joined=True)
    tensors = sources(torch.float32)
    tensors["c"][4, 1, 2] = 1e6  # finite here, and not in sixteen bits
    assert packed.whole is not None
    with DeviceCopier(packed.whole) as copier:
        for name, tensor in tensors.items():
            copier.fill(name, packed[name], tensor)
        with pytest.raises(CheckpointError, match="tensor 'c' has 1 values that are NaN or inf"):
            copier.finish()


def test_joined_tensors_exchange_values_in_place() -> None:
    ours, theirs = (PackedTensors.empty(SHAPES, "cpu", torch.float32, joined=True) for _ in "ab")
    numbers = sources(torch.float32)
    for name, tensor in numbers.items():
        ours[name].copy_(tensor)
        theirs[name].copy_(2 * tensor)
    places = [tensor.data_ptr() for tensor in ours.values()]
    assert all((place - places[0]) % 256 == 0 for place in places)
    ours.exchange(theirs)
    assert [tensor.data_ptr() for tensor in ours.values()] == places
    for name, tensor in numbers.items():
        assert torch.equal(ours[name], 2 * tensor)
        assert torch.equal(theirs[name], tensor)


def test_joined_weights_exchange_values_and_keep_their_addresses(tiny: Path, tiny2: Path) -> None:
    layout = Layout(ModelConfig.read(tiny))

    def joined(path: Path) -> Weights:
        packed = PackedTensors.empty(layout.shapes, "cpu", torch.float32, joined=True)
        read = Weights.load(path, layout, path.name, device="cpu", dtype=torch.float32)
        for name, tensor in read.packed.items():
            packed[name].copy_(tensor)
        return Weights(layout, packed, path.name)

    served, staged = joined(tiny), joined(tiny2)
    places = {name: tensor.data_ptr() for name, tensor in served.packed.items()}
    numbers = {name: tensor.clone() for name, tensor in staged.packed.items()}
    before = served.layers[1].down.clone()
    served.exchange_memory(staged)
    assert {name: tensor.data_ptr() for name, tensor in staged.packed.items()} == places
    assert all(torch.equal(tensor, numbers[name]) for name, tensor in staged.packed.items())
    assert staged.layers[1].down.data_ptr() == places["layers.1.down"]
    assert torch.equal(served.layers[1].down, before)


def test_an_exchange_skips_shared_tensors() -> None:
    ours = PackedTensors.empty(SHAPES, "cpu", torch.float32, joined=True)
    theirs = PackedTensors(ours)
    theirs["b"] = ours["b"] + 1
    before = {name: tensor.clone() for name, tensor in ours.items()}
    ours.exchange(theirs)
    assert torch.equal(ours["b"], before["b"] + 1)
    assert torch.equal(theirs["b"], before["b"])
    assert all(torch.equal(ours[name], before[name]) for name in "acd")
