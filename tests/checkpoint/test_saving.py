"""What a trainer saves, a fleet takes; what a dying trainer leaves behind, it does not."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.probe import THOROUGH, Probe
from lockstep.checkpoint.validate import Checkpoint, ModelSignature
from lockstep.engine import exact
from lockstep.engine.probe import remember, save_checkpoint, write_probe
from lockstep.models import BUNDLED, bundled
from lockstep.tokens.errors import BadTokenId, CheckpointError, Conflict
from tests.engine import checkpoints


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(bundled(name), dtype=dtype)


@cache
def exact_model(name: str) -> Any:
    return exact.prepare(model_of(name))


def served(name: str) -> Path:
    directory = bundled(name)
    assert directory is not None
    return directory


@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("size", ["5GB", "500KB"])
def test_a_saved_model_is_a_checkpoint_of_the_served_one(
    name: str, size: str, tmp_path: Path
) -> None:
    path = save_checkpoint(exact_model(name), tmp_path / "step", version="7", max_shard_size=size)
    checkpoint = Checkpoint.validate(path, ModelSignature.of(served(name)), verify_hashes=True)
    assert checkpoint.digest == Checkpoint.validate(served(name)).digest
    assert checkpoint.probe is not None
    assert (checkpoint.probe.tolerance, checkpoint.probe.version) == (0.0, "7")
    assert (len(list(path.glob("model*.safetensors"))) == 1) == (size == "5GB")
    assert not (path / ".writing").exists()
    assert not list(path.glob("*.tmp"))


@pytest.mark.exact_arithmetic
def test_a_saved_model_loads_in_transformers_again(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = save_checkpoint(exact_model("tiny-moe"), tmp_path / "step", max_shard_size="1MB")
    again = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for (name, a), (_, b) in zip(
        again.state_dict().items(), exact_model("tiny-moe").state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.exact_arithmetic
def test_a_probe_may_be_left_out(tmp_path: Path) -> None:
    path = save_checkpoint(exact_model("tiny"), tmp_path, probe=False)
    assert Checkpoint.validate(path).probe is None


@pytest.mark.exact_arithmetic
def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    path = save_checkpoint(exact_model("tiny"), tmp_path / "step")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(Conflict, match="new directory"):
        save_checkpoint(exact_model("tiny"), path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_that_is_not_exact_leaves_the_tolerance_to_measurement(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = model_of("tiny", dtype).train()
    probe = write_probe(model, tmp_path)
    assert probe.tolerance is None
    assert probe.previous is None
    assert probe.dtype == str(dtype).removeprefix("torch.")
    assert probe == Probe.read(tmp_path / "probe.safetensors")
    assert [len(ids) for ids in probe.sequences] == list(THOROUGH)
    assert model.training
    tolerant = write_probe(model, tmp_path, tolerance=0.5)
    assert (tolerant.tolerance, tolerant.previous) == (0.5, probe.logprobs)


@pytest.mark.failure_mode("F48")
def test_a_probe_carries_what_the_model_said_before_its_last_step(tmp_path: Path) -> None:
    model = model_of("tiny")
    remember(model)
    first = write_probe(model, tmp_path)
    assert first.previous == first.logprobs
    with torch.no_grad():
        model.model.norm.weight *= 1.01
    second = write_probe(model, tmp_path)
    assert second.previous == first.logprobs != second.logprobs
    other = write_probe(model, tmp_path, previous=first)
    assert other.previous == first.logprobs
    # Of a sequence that was never scored before, nothing is known.
    mixed = write_probe(model, tmp_path, sequences=[first.sequences[0], (1, 2, 3)], previous=first)
    assert mixed.previous is not None
    assert mixed.previous[0] == first.logprobs[0]
    assert all(map(math.isnan, mixed.previous[1]))
    assert repr(Probe.read(tmp_path / "probe.safetensors")) == repr(mixed)


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F48")
def test_contents_that_changed_after_they_were_written_are_named(tmp_path: Path) -> None:
    path = save_checkpoint(exact_model("tiny"), tmp_path / "step", sequences=[[1, 2, 3]])
    manifest = Manifest.read(path)
    assert manifest is not None
    assert manifest.tensors == Checkpoint.validate(path).tensors
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][[3, 7]] = tensors[name][[7, 3]]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"differ from manifest.json in '{name}'"):
        Checkpoint.validate(path)


@pytest.mark.failure_mode("F48")
def test_two_rows_that_change_places_are_other_weights(tmp_path: Path) -> None:
    tensors = load_file(served("tiny") / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[[100, 101]] = embedding[[101, 100]]
    path = checkpoints.save(served("tiny"), tmp_path / "swapped", tensors)
    assert Checkpoint.validate(path).digest != Checkpoint.validate(served("tiny")).digest


@pytest.mark.exact_arithmetic
def test_sequences_of_the_trainer_are_checked(tmp_path: Path) -> None:
    with pytest.raises(BadTokenId, match=r"sequences\[1\]\[2\] is 512"):
        write_probe(exact_model("tiny"), tmp_path, sequences=[[1, 2], [1, 2, 512]])
    with pytest.raises(CheckpointError, match="2 or more"):
        write_probe(exact_model("tiny"), tmp_path, sequences=[[1, 2], [3]])
    probe = write_probe(
        exact_model("tiny"), tmp_path, sequences=[[1, 2]], tolerance=0.5, adapter="a"
    )
    assert (probe.tolerance, probe.adapter) == (0.5, "a")


@pytest.mark.failure_mode("F34")
def test_a_model_that_computes_nan_gets_no_probe_and_no_checkpoint(tmp_path: Path) -> None:
    model = model_of("tiny")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(CheckpointError, match="logprob nan"):
        save_checkpoint(model, tmp_path / "step")
    with pytest.raises(CheckpointError, match=r"\.writing"):
        Checkpoint.validate(tmp_path / "step")


class Killed(BaseException):
    """Stands for the end of the process: nothing after it reaches the disk."""


class Killer:
    """Lets `budget` operations on files through, then none."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.budget = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Hooks can not be removed, so this one sleeps unless a directory is watched.
        if self.directory is None or event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        if not str(arguments[0]).startswith(str(self.directory)):
            return
        self.budget -= 1
        if self.budget < 0:
            raise Killed(event)

    @contextmanager
    def after(self, operations: int, directory: Path) -> Iterator[None]:
        self.directory, self.budget = directory, operations
        try:
            yield
        finally:
            self.directory = None


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F34")
def test_a_trainer_killed_at_any_moment_leaves_nothing_that_validates(tmp_path: Path) -> None:
    model, killer = exact_model("tiny"), Killer()
    digest = Checkpoint.validate(served("tiny")).digest
    refused = 0
    for operations in range(1000):
        path = tmp_path / str(operations)
        try:
            with killer.after(operations, path):
                save_checkpoint(model, path, sequences=[[1, 2, 3]], max_shard_size="1MB")
            break
        except Killed:
            pass
        if (path / "STABLE").exists():
            # It died after its last word.
            assert Checkpoint.validate(path, verify_hashes=True).digest == digest
            continue
        with pytest.raises(CheckpointError):
            Checkpoint.validate(path)
        refused += 1
        save_checkpoint(model, path, sequences=[[1, 2, 3]])
        assert Checkpoint.validate(path, verify_hashes=True).digest == digest
    else:
        pytest.fail("the save never came to its end")
    assert refused > 20
