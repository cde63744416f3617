"""A trainer over other engines rejects adapters that they cannot serve when a model is created."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.engine import exact
from lockstep.integrations.tinker.attached import AttachedTrainer
from lockstep.integrations.tinker.options import TrainerOptions
from lockstep.integrations.tinker.samplers import Samplers
from lockstep.integrations.tinker.training.lora_tensors import LoraModel, LoraSettings
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest, UpdateFailed
from lockstep.tokens.numerics import NumericsPlan
from tests.integrations.tinker.training.test_training_model import load

pytestmark = pytest.mark.exact_arithmetic

ALL = LoraSettings(rank=8)


class PickyWorkers:
    """Samplers on workers that cannot prove adapters of some modules."""

    def __init__(self, *refused: str) -> None:
        self.refused = set(refused)
        self.served: list[list[str]] = []

    async def serve(self, directory: Path | None) -> str:
        assert directory is not None
        targets = json.loads((directory / "adapter_config.json").read_text())["target_modules"]
        self.served.append(targets)
        if self.refused & set(targets):
            raise UpdateFailed("no worker proved it")
        return "tinker-1"

    async def forget(self, directory: Path) -> None:
        assert directory.exists()

    def check_base(self) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def base() -> Any:
    return exact.prepare(load())


@pytest.fixture
def made(base: Any, tmp_path: Path) -> Iterator[Any]:
    trainers: list[AttachedTrainer] = []

    def make(workers: PickyWorkers, plan: NumericsPlan | None = None, **options: Any) -> Any:
        own = exact.own_plan(cast("Path", bundled("tiny")))
        trainer = AttachedTrainer(
            TrainerOptions(model="tiny", **options), LoraModel(base, is_exact=True, max_rank=64),
            own, plan, cast("Samplers", workers), tmp_path / "gateway" / "tinker",
        )  # fmt: skip
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.thread.shutdown()


@pytest.mark.failure_mode("F84")
async def test_an_adapter_of_the_head_that_workers_cannot_serve_is_an_error_with_a_way_out(
    made: Any,
) -> None:
    workers = PickyWorkers("lm_head")
    trainer = made(workers)
    with pytest.raises(BadRequest, match="create the model with train_unembed=False"):
        await trainer.check_served(ALL)
    tried = len(workers.served)
    await trainer.check_served(LoraSettings(rank=8, train_unembed=False, seed=7))
    assert len(workers.served) == tried, "what was proved once is not tried again"


async def test_other_adapters_that_cannot_be_served_are_an_error_with_the_reason(made: Any) -> None:
    with pytest.raises(BadRequest, match=r"other settings.*\(no worker proved it\)"):
        await made(PickyWorkers("q_proj")).check_served(ALL)


async def test_embedded_workers_need_no_trial_adapter(made: Any) -> None:
    workers = PickyWorkers("lm_head")
    await made(workers, exact.own_plan(cast("Path", bundled("tiny")))).check_served(ALL)
    assert workers.served == []


def test_the_tolerance_of_other_engines_is_measured_in_16_bits_only(made: Any) -> None:
    assert made(PickyWorkers()).model.close_tolerance == 1e-3
    assert made(PickyWorkers(), dtype="bfloat16").model.close_tolerance is None
