"""What a trainer saves, a fleet takes; what a dying trainer leaves behind, it does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine import exact
from lockstep.engine.probe import save_checkpoint, write_probe
from lockstep.fleet.checkpoint import Checkpoint, Signature
from lockstep.models import BUNDLED, bundled
from lockstep.tokens.errors import BadTokenId, CheckpointError, Conflict
from lockstep.wire.probe import LENGTHS, Probe


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(bundled(name), dtype=dtype)


@cache
def exact_model(name: str) -> Any:
    return exact.prepare(model_of(name))


def served(name: str) -> Path:
    found = bundled(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("size", ["5GB", "500KB"])
def test_a_saved_model_is_a_checkpoint_of_the_served_one(
    name: str, size: str, tmp_path: Path
) -> None:
    path = save_checkpoint(exact_model(name), tmp_path / "step", version="7", max_shard_size=size)
    found = Checkpoint.validate(path, Signature.of(served(name)), verify_hashes=True)
    assert found.digest == Checkpoint.validate(served(name)).digest
    assert found.probe is not None
    assert (found.probe.tolerance, found.probe.version) == (0.0, "7")
    assert (len(list(path.glob("model*.safetensors"))) == 1) == (size == "5GB")
    assert not (path / ".writing").exists()
    assert not list(path.glob("*.tmp"))


def test_a_saved_model_loads_in_transformers_again(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = save_checkpoint(exact_model("tiny-moe"), tmp_path / "step", max_shard_size="1MB")
    again = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for (name, a), (_, b) in zip(
        again.state_dict().items(), exact_model("tiny-moe").state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


def test_a_probe_may_be_left_out(tmp_path: Path) -> None:
    path = save_checkpoint(exact_model("tiny"), tmp_path, probe=False)
    assert Checkpoint.validate(path).probe is None


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    path = save_checkpoint(exact_model("tiny"), tmp_path / "step")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(Conflict, match="new directory"):
        save_checkpoint(exact_model("tiny"), path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 0.03), (torch.bfloat16, 0.25)]
)
def test_a_model_that_is_not_exact_gets_a_tolerance(
    dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    model = model_of("tiny", dtype).train()
    probe = write_probe(model, tmp_path)
    assert probe.tolerance == tolerance
    assert probe == Probe.read(tmp_path / "probe.safetensors")
    assert [len(ids) for ids in probe.sequences] == list(LENGTHS)
    assert model.training
    reference = write_probe(exact_model("tiny"), tmp_path, sequences=probe.sequences)
    assert reference.tolerance == 0.0
    assert probe.judge(reference.logprobs).passed


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
