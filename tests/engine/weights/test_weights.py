"""Checkpoints: loaded completely or rejected, updated by name, never changing the live weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.checkpoint.tensor_names import EMBEDDING, HEAD
from lockstep.engine.weights.weights import Weights
from lockstep.tokens.errors import CheckpointError
from tests.engine import checkpoints
from tests.engine.rig import Rig, ids

Q = "model.layers.1.self_attn.q_proj.weight"
PROBE = ids(1, 90)


@pytest.fixture(scope="module")
def rig(tiny: Path) -> Rig:
    return Rig(tiny, weight_version="v1")


@pytest.fixture
def live(rig: Rig) -> Weights:
    return rig.core.served.weights


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors.get(name, torch.zeros(4, 4)))

    return change


def with_nan(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[5] = torch.nan
    return tensor


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop(Q), f"lacks tensor '{Q}'"),
        (put("model.layers.7.mlp.up_proj.weight", torch.clone), "is not part of this qwen3 model"),
        (put(Q, lambda t: t[:-1]), r"has shape \(127, 128\), expected \(128, 128\)"),
        (put(Q, lambda t: t.T[None]), r"has shape \(1, 128, 128\)"),
        (put(Q, lambda t: t.to(torch.int32)), "has dtype torch.int32"),
        (put(Q, lambda t: t.to(torch.float8_e4m3fn)), "has dtype torch.float8"),
        (put(Q, with_nan), "1 values that are NaN or infinite"),
        (put(Q, lambda t: t.double() + 1e300), "16384 values that are NaN or infinite as"),
        (put(HEAD, lambda t: torch.ones(512, 128)), "the served model ties them"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_rejected(
    rig: Rig, tiny: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], says: str
) -> None:
    before = rig.core.score(PROBE)
    tensors = checkpoints.tensors_of(tiny)
    change(tensors)
    checkpoints.save(tiny, tmp_path, tensors)
    with pytest.raises(CheckpointError, match=says):
        rig.core.served.load_weights(tmp_path, "v2")
    assert rig.core.served.weights.version == "v1"
    assert rig.core.score(PROBE) == before


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize("keep", [0, 4, 500, -1, -4096])
def test_a_truncated_file_is_rejected(rig: Rig, tiny: Path, tmp_path: Path, keep: int) -> None:
    checkpoints.variant(tiny, tmp_path, seed=1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="header"):
        rig.core.served.load_weights(tmp_path, "v2")


def sharded(source: Path, target: Path) -> Path:
    """Write the checkpoint in two files with an index."""
    tensors = checkpoints.tensors_of(source)
    checkpoints.save(source, target, {})
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, target / file)
    where = {name: file for file, part in files.items() for name in part}
    index = {"metadata": {}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def test_a_sharded_checkpoint_is_the_same_as_a_whole_one(
    rig: Rig, tiny: Path, tmp_path: Path
) -> None:
    loaded = rig.core.served.load_weights(sharded(tiny, tmp_path), "v2")
    assert rig.core.score(PROBE, weights=loaded) == rig.core.score(PROBE)


@pytest.mark.failure_mode("F34")
def test_a_missing_shard_is_rejected(rig: Rig, tiny: Path, tmp_path: Path) -> None:
    (sharded(tiny, tmp_path) / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two.safetensors does not exist"):
        rig.core.served.load_weights(tmp_path, "v2")


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_invalid_index_is_rejected(rig: Rig, tiny: Path, tmp_path: Path, index: str) -> None:
    (sharded(tiny, tmp_path) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json|two.safetensors"):
        rig.core.served.load_weights(tmp_path, "v2")


@pytest.mark.parametrize("name", ["../one.safetensors", "/tmp/one.safetensors", "a/b"])
def test_an_index_that_points_outside_is_rejected(
    rig: Rig, tiny: Path, tmp_path: Path, name: str
) -> None:
    index = json.dumps({"weight_map": {Q: name}})
    (sharded(tiny, tmp_path) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="which is not a file beside it"):
        rig.core.served.load_weights(tmp_path, "v2")


@pytest.mark.failure_mode("F34")
def test_a_tensor_in_two_shards_is_rejected(rig: Rig, tiny: Path, tmp_path: Path) -> None:
    sharded(tiny, tmp_path)
    save_file(checkpoints.tensors_of(tiny), tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="places it in"):
        rig.core.served.load_weights(tmp_path, "v2")


@pytest.mark.failure_mode("F34")
def test_a_directory_without_a_checkpoint_is_rejected(rig: Rig, moe: Path, tmp_path: Path) -> None:
    load = rig.core.served.load_weights
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path, "v2")
    with pytest.raises(CheckpointError, match="not a directory"):
        load(tmp_path / "nowhere", "v2")
    with pytest.raises(CheckpointError, match=r"has family 'qwen3_moe', the served model 'qwen3'"):
        load(moe, "v2")


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize(
    "changes", [{"rms_norm_eps": 1e-5}, {"rope_parameters": {"rope_theta": 5.0}}, {"head_dim": 64}]
)
def test_another_config_is_rejected_even_when_the_tensors_fit(
    rig: Rig, tiny: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    checkpoints.variant(tiny, tmp_path, seed=1)
    checkpoints.edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match="the served model"):
        rig.core.served.load_weights(tmp_path, "v2")


@pytest.mark.exact_arithmetic
def test_a_checkpoint_without_a_config_is_accepted(rig: Rig, tiny2: Path, tmp_path: Path) -> None:
    checkpoints.save(tiny2, tmp_path, checkpoints.tensors_of(tiny2))
    (tmp_path / "config.json").unlink()
    loaded = rig.core.served.load_weights(tmp_path, "v2")
    assert rig.core.score(PROBE, weights=loaded) == checkpoints.reference(tiny2, PROBE)


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("model", ["tiny", "moe"])
def test_an_update_by_name_gives_exactly_the_model_with_that_tensor(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each part of a fused module, an expert and a norm, alone, compared with transformers."""
    directory: Path = request.getfixturevalue(model)
    rig = Rig(directory, weight_version="v1")
    other = checkpoints.tensors_of(request.getfixturevalue(f"{model}2"))
    layer = "model.layers.1."
    names = [f"{layer}self_attn.{p}_proj.weight" for p in "qkvo"] + [
        f"{layer}input_layernorm.weight"
    ]
    mlp = f"{layer}mlp." if model == "tiny" else f"{layer}mlp.experts.5."
    names += [f"{mlp}{p}_proj.weight" for p in ("gate", "up", "down")]
    names += [] if model == "tiny" else [f"{layer}mlp.gate.weight"]
    for at, name in enumerate(names):
        tensors = checkpoints.tensors_of(directory) | {name: other[name]}
        expected = checkpoints.save(directory, tmp_path / str(at), tensors)
        updated = rig.core.served.weights.with_tensors([(name, other[name])], "v2")
        assert rig.core.score(PROBE, weights=updated) == checkpoints.reference(expected, PROBE)
    assert rig.core.score(PROBE) == checkpoints.reference(directory, PROBE)


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_a_tied_head_follows_the_embedding_under_either_name(
    rig: Rig, live: Weights, tiny: Path, tiny2: Path, tmp_path: Path, name: str
) -> None:
    embedding = checkpoints.tensors_of(tiny2)[EMBEDDING]
    updated = live.with_tensors([(name, embedding)], "v2")
    assert updated.head is updated.embed
    tensors = checkpoints.tensors_of(tiny) | {EMBEDDING: embedding}
    expected = checkpoints.reference(checkpoints.save(tiny, tmp_path, tensors), PROBE)
    assert rig.core.score(PROBE, weights=updated) == expected


def test_a_tied_pair_must_have_equal_contents(live: Weights) -> None:
    embedding = live.embed + 1
    both = [(EMBEDDING, embedding), (HEAD, embedding.clone())]
    assert torch.equal(live.with_tensors(both, "v2").head, embedding)
    with pytest.raises(CheckpointError, match="came twice"):
        live.with_tensors([(EMBEDDING, embedding), (HEAD, embedding + 1)], "v2")


@pytest.mark.failure_mode("F34")
@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ((Q, torch.zeros(128, 127)), "has shape"),
        ((Q, torch.zeros(128, 128, dtype=torch.long)), "has dtype"),
        ((Q, torch.full((128, 128), torch.inf)), "NaN or infinite"),
        (("model.layers.1.self_attn.qkv_proj.weight", torch.zeros(3)), "is not part of"),
    ],
)
def test_a_bad_update_is_rejected_and_the_live_weights_stay(
    live: Weights, tensor: tuple[str, Tensor], says: str
) -> None:
    before = {name: packed.clone() for name, packed in live.packed.items()}
    good = (Q.replace("layers.1", "layers.0"), torch.zeros(128, 128))
    with pytest.raises(CheckpointError, match=says):
        live.with_tensors([good, tensor], "v2")
    assert all(torch.equal(before[name], packed) for name, packed in live.packed.items())


def test_an_empty_update_is_rejected(live: Weights) -> None:
    with pytest.raises(CheckpointError, match="without tensors"):
        live.with_tensors([], "v2")


def test_weights_with_the_same_label_are_distinguished(rig: Rig, live: Weights, tiny: Path) -> None:
    again = rig.core.served.load_weights(tiny, live.version)
    updated = live.with_tensors([(EMBEDDING, live.embed)], live.version)
    assert len({live.epoch, again.epoch, updated.epoch}) == 3


def test_sixteen_bit_checkpoints_are_widened(rig: Rig, tiny: Path, tmp_path: Path) -> None:
    halves = {name: t.bfloat16() for name, t in checkpoints.tensors_of(tiny).items()}
    loaded = rig.core.served.load_weights(checkpoints.save(tiny, tmp_path, halves), "v2")
    assert {t.dtype for t in loaded.packed.values()} == {torch.float32}
    assert torch.equal(loaded.embed, halves[EMBEDDING].float())
