"""Real workers that read, or compute with, other weights than they were sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.backends.admin import Source, WeightContents
from lockstep.backends.lockstep.admin import LockstepAdmin
from lockstep.checkpoint.validate import Checkpoint
from lockstep.engine.numerics.bf16 import make_bf16_safe
from lockstep.engine.probe import remember, save_checkpoint
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool
from lockstep.models import bundled
from lockstep.tokens.errors import LockstepError
from tests.engine import checkpoints
from tests.fleet.fakes import until
from tests.fleet.weight_faults import FAULTS, Fault, Tensors, stepped, written
from tests.processes import TOKEN, WorkerProcess

DTYPES = ("float32", "bfloat16")
STEP, TINY_STEP = 0.03, 1e-4
FIRST = "default"


class MisledAdmin(LockstepAdmin):
    """Has its worker read another directory. With `claims`, the worker says that it read the right
    one: so does an engine that read the right weights and computes with others."""

    reads: Path | None = None
    claims: str | None = None

    async def stage(self, source: Source, version: str) -> None:
        await super().stage(source if self.reads is None else Source(directory=self.reads), version)

    async def contents(self, *, staged: bool = False, tensors: bool = False) -> WeightContents:
        held = await super().contents(staged=staged, tensors=tensors)
        if self.claims is None:
            return held
        return WeightContents(self.claims, held.dtype, held.proof)


@dataclass
class Rig:
    """A worker that is not exact, a trainer of its model, and checkpoints of the first steps."""

    worker: WorkerProcess
    source: Path
    first: Path
    next: Path
    tiny: Path
    directory: Path
    old: Tensors
    new: Tensors

    def wrong(self, fault: Fault) -> Path:
        path = self.directory / fault.replace(" ", "-")
        if not path.exists():
            written(fault, self.source, path, self.old, self.new)
        return path

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[tuple[Fleet, MisledAdmin]]:
        await self.worker.control("resume_generation")
        await self.worker.control(
            "update_weights_from_disk", model_path=str(self.first), weight_version=FIRST
        )
        async with Pool(probe_seconds=0.2) as pool, Fleet(pool) as fleet:
            admin = MisledAdmin(self.worker.system_url, TOKEN)
            await fleet.add(self.worker.url, admin, worker_id="w0")
            await until(lambda: any(one.state == "serving" for one in pool.workers), 30)
            yield fleet, admin


@pytest.fixture(scope="module", params=DTYPES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    from transformers import AutoModelForCausalLM

    make_bf16_safe()
    torch.set_num_threads(1)
    source = bundled("tiny-moe")
    assert source is not None
    dtype, directory = getattr(torch, request.param), tmp_path_factory.mktemp(request.param)
    old = {name: t.to(dtype) for name, t in checkpoints.tensors_of(source).items()}
    new = stepped(old, STEP)
    first = checkpoints.save(source, directory / "first", old)

    def trained(tensors: Tensors, name: str) -> Path:
        path = checkpoints.save(source, directory / f"plain-{name}", tensors)
        model = AutoModelForCausalLM.from_pretrained(first, dtype=dtype)
        remember(model)
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict())
        return save_checkpoint(model, directory / name)

    paths = trained(new, "next"), trained(stepped(old, TINY_STEP), "tiny")
    worker = WorkerProcess(
        "--dtype", request.param, "--arithmetic", "close", "--max-model-len", "512",
        model="tiny-moe",
    )  # fmt: skip
    yield Rig(worker, source, first, *paths, directory, old, new)
    worker.stop(9)


async def evidence(fleet: Fleet) -> Any:
    decision = (await fleet.operations.latest(1))[0].workers["w0"].evidence
    assert decision is not None
    return decision


@pytest.mark.failure_mode("F48")
async def test_the_right_weights_are_proved_without_a_number_from_the_user(rig: Rig) -> None:
    async with rig.fleet() as (fleet, _):
        operation = await fleet.update_weights(str(rig.next), version="next")
        decision = await evidence(fleet)
        assert (decision.decided_by, decision.digest) == ("scores", "match")
        assert decision.max_difference <= decision.bound
        assert operation.workers["w0"].evidence == decision
        # And back: a checkpoint without a probe is proved by the workers' own scores.
        await fleet.update_weights(str(rig.first), version="back")
        assert ((await evidence(fleet)).decided_by, (await evidence(fleet)).digest) == (
            "majority",
            "match",
        )


@pytest.mark.failure_mode("F49")
async def test_a_tiny_step_is_proved_by_what_the_worker_read(rig: Rig) -> None:
    async with rig.fleet() as (fleet, admin):
        admin.reads, admin.claims = rig.first, None  # it keeps the old weights
        with pytest.raises(LockstepError, match="read contents that differ from the checkpoint"):
            await fleet.update_weights(str(rig.tiny), version="tiny")
        admin.reads = None
        await fleet.update_weights(str(rig.tiny), version="tiny")
        decision = await evidence(fleet)
        assert decision.digest == "match"
        assert decision.decided_by in ("scores", "digest")


@pytest.mark.failure_mode("F48")
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_worker_that_read_other_weights_is_caught(rig: Rig, fault: Fault) -> None:
    async with rig.fleet() as (fleet, admin):
        admin.reads = rig.wrong(fault)
        with pytest.raises(
            LockstepError, match="read contents that differ from the checkpoint, in '"
        ):
            await fleet.update_weights(str(rig.next), version="next")
        assert ((await evidence(fleet)).decided_by, (await evidence(fleet)).digest) == (
            "digest",
            "mismatch",
        )
        assert fleet.desired.version == FIRST


@pytest.mark.failure_mode("F48")
@pytest.mark.parametrize("fault", ["old weights kept", "one layer kept", "one tensor zeroed"])
async def test_a_worker_that_computes_with_other_weights_than_it_read_is_caught(
    rig: Rig, fault: Fault
) -> None:
    async with rig.fleet() as (fleet, admin):
        admin.reads, admin.claims = rig.wrong(fault), Checkpoint.validate(rig.next).digest
        with pytest.raises(LockstepError, match="its logprobs are off by"):
            await fleet.update_weights(str(rig.next), version="next")
        assert (await evidence(fleet)).decided_by == "scores"
        assert fleet.desired.version == FIRST


@pytest.mark.failure_mode("F48")
async def test_a_worker_that_joins_with_old_weights_is_caught_and_corrected(rig: Rig) -> None:
    async with rig.fleet() as (fleet, admin):
        await fleet.update_weights(str(rig.next), version="next")
        # The old weights get the new label; the fleet detects it when the worker returns.
        await rig.worker.control(
            "update_weights_from_disk", model_path=str(rig.first), weight_version="next"
        )
        fleet.state.quarantine(fleet.worker("w0"), "for the test")
        await until(lambda: fleet.worker("w0").state == "serving", 30)
        held = await admin.contents()
        assert held.digest == Checkpoint.validate(rig.next).digest
