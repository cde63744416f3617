"""Ranks with slices or copies of a model write one checkpoint, which workers load and prove."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.manifest import STABLE
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.probe import Probe
from lockstep.checkpoint.sliced_reader import SlicedReader
from lockstep.checkpoint.validate import Checkpoint, ModelSignature
from lockstep.engine import Engine
from tests.engine import running
from tests.engine.running import score
from tests.engine.sharded import trainers
from tests.ranks import run_ranks

pytestmark = pytest.mark.exact_arithmetic


async def proved(engine: Engine, path: Path) -> Probe:
    """The probe of a checkpoint, whose every bit the engine computes from its weights."""
    probe = Probe.beside(path)
    assert probe is not None
    await engine.stage(path, path.name)
    for ids, logprobs in zip(probe.sequences, probe.logprobs, strict=True):
        assert await score(engine, list(ids), staged=True) == list(logprobs)
    await engine.rollback()
    return probe


@pytest.fixture
def moe_engine(moe: Path) -> Iterator[Engine]:
    engine = running.make(moe)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("fsdp")
    return path, run_ranks(3, path, trainers.train_and_save, path)


Fsdp = tuple[Path, list[dict[str, Any]]]


@pytest.mark.failure_mode("F79")
async def test_the_probe_is_of_the_weights_that_were_written(
    fsdp: Fsdp, engine: Engine, tiny: Path
) -> None:
    path, _ = fsdp
    checkpoint = Checkpoint.validate(path / "step-1", ModelSignature.of(tiny), verify_hashes=True)
    assert checkpoint.probe is not None
    assert (checkpoint.probe.tolerance, checkpoint.probe.version) == (0.0, "step-1")
    first = await proved(engine, path / "step-1")
    assert first.previous is not None
    assert first.previous != first.logprobs
    second = await proved(engine, path / "step-2")
    assert second.previous == first.logprobs


def test_each_rank_casts_and_writes_its_own_slices_and_keeps_its_weights(
    fsdp: Fsdp, tiny: Path
) -> None:
    path, results = fsdp
    checkpoint = Checkpoint.validate(path / "step-2", ModelSignature.of(tiny))
    assert {tensor.dtype for tensor in checkpoint.signature.tensors.values()} == {"BF16"}
    assert [result["unchanged"] for result in results] == [True] * 3
    assert checkpoint.tensors == results[0]["digests"]
    reader = open_checkpoint(path / "step-2")
    assert isinstance(reader, SlicedReader)
    shares = [record.nbytes / checkpoint.nbytes for record in reader.records]
    assert 0.3 < min(shares) <= max(shares) < 0.35
    assert all("call lockstep.sharded.save_checkpoint" in result["alone"] for result in results)


def test_weights_are_saved_in_the_dtype_in_which_a_mixed_precision_policy_computes(
    fsdp: Fsdp,
) -> None:
    path, results = fsdp
    checkpoint = Checkpoint.validate(path / "mixed")
    assert {tensor.dtype for tensor in checkpoint.signature.tensors.values()} == {"BF16"}
    assert checkpoint.probe is not None
    assert (checkpoint.probe.dtype, checkpoint.probe.tolerance) == ("bfloat16", None)
    for result in results:
        assert "dtype is torch.float32, but the mixed precision policy" in result["dtype"]


async def test_fused_experts_with_replicas_are_saved_under_the_names_of_the_model(
    tmp_path: Path, moe: Path, moe_engine: Engine
) -> None:
    digests = run_ranks(4, tmp_path, trainers.save_replicas, tmp_path)
    assert digests[1:] == digests[:1] * 3
    checkpoint = Checkpoint.validate(tmp_path / "moe", ModelSignature.of(moe), verify_hashes=True)
    same = {name for name, digest in checkpoint.tensors.items() if digests[0].get(name) == digest}
    assert {name for name in checkpoint.tensors if ".experts." not in name} == same
    await proved(moe_engine, tmp_path / "moe")
    reader = open_checkpoint(tmp_path / "moe")
    assert isinstance(reader, SlicedReader)
    shares = [record.nbytes / checkpoint.nbytes for record in reader.records]
    assert 0.15 < min(shares) <= max(shares) < 0.35


@pytest.mark.failure_mode("F86")
@pytest.mark.failure_mode("F87")
async def test_ranks_with_copies_write_together_and_every_failure_names_its_rank(
    tmp_path: Path, engine: Engine
) -> None:
    first, second = run_ranks(2, tmp_path, trainers.save_copies, tmp_path)
    await proved(engine, tmp_path / "ddp")
    assert first["exists"].startswith("Conflict: ")
    assert "CheckpointError: rank 0 could not prepare" in second["exists"]
    other_step = "saves version 'step-{}' as None to .* all ranks must save the same step"
    assert_matches(first["step"], "rank 1 of 2 " + other_step.format(1))
    assert_matches(second["step"], "rank 0 of 2 " + other_step.format(0))
    for result in (first, second):
        assert_matches(result["drifted"], "rank 1 of 2 computes other logprobs than rank 0")
    assert_matches(first["full"], "rank 1 of 2 could not write its part of .*: OSError.*No space")
    assert_matches(second["full"], "OSError: .*No space left")
    assert_matches(first["absent"], "rank 1 of 2 has not called to save a checkpoint within 0.5 s")
    for name in ("step", "drifted", "full", "absent"):
        assert not (tmp_path / name / STABLE).exists()


def assert_matches(text: str, pattern: str) -> None:
    assert re.search(pattern, text), text
