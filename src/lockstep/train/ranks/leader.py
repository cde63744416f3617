"""Rank 0 of a run: announces each call of its learner, so that the other ranks make it too."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import TrainBatch
from lockstep.train.learning.learner import StepOutcome, own_plan
from lockstep.train.ranks.rank_group import RankGroup
from lockstep.train.ranks.sharded_learner import ShardedLearner
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.tensor_digests import Digests

log = logging.getLogger(__name__)
PLAN, OPEN, END = "plan", "open", "end"
"""Commands besides the methods of a learner."""


class LeadingLearner(ShardedLearner):
    """Rank 0's learner. Raises Unavailable that names a rank which is lost."""

    _ranks: RankGroup
    _warned = False

    @classmethod
    def open(
        cls, config: TrainConfig, *, exact: bool, weights: Path | None, ranks: RankGroup
    ) -> LeadingLearner:
        ranks.announce(OPEN, config, exact, weights)
        with ranks.working("loading the model"):
            learner = cls(config, exact=exact, weights=weights, group=ranks.group)
        learner._ranks = ranks
        return learner

    def step(self, batch: TrainBatch, number: int) -> StepOutcome:
        self._ranks.announce("step", batch, number)
        with self._ranks.working(f"learning step {number}"):
            outcome = super().step(batch, number)
        self._warn_of_idle_ranks(len(outcome.passes), number)
        return outcome

    def _warn_of_idle_ranks(self, passes: int, step: int) -> None:
        if passes >= self._ranks.count or self._warned:
            return
        self._warned = True
        log.warning(
            "step %d has %d forward passes for %d ranks: lower learner.pass_tokens, which is %d, "
            "so that every rank has one",
            step, passes, self._ranks.count, self._config.learner.pass_tokens,
        )  # fmt: skip

    def save_step(self, directory: RunDirectory, step: int, facts: Mapping[str, Any]) -> Digests:
        self._ranks.announce("save_step", directory, step, {})
        with self._ranks.working(f"saving step {step}"):
            return super().save_step(directory, step, facts)

    def load_step(self, directory: RunDirectory, step: int) -> dict[str, Any]:
        self._ranks.announce("load_step", directory, step)
        with self._ranks.working(f"loading step {step}"):
            return super().load_step(directory, step)

    def digests(self, checkpoint: Path) -> Digests:
        self._ranks.announce("digests", checkpoint)
        with self._ranks.working("computing digests"):
            return super().digests(checkpoint)


def shared_plan(config: TrainConfig, ranks: RankGroup) -> NumericsPlan:
    """Return how all ranks compute: the plan of rank 0, if it is exact and theirs agree with it."""
    ranks.announce(PLAN, config)
    with ranks.working("preparing"):
        plans = exchange_plans(config, ranks)
    return reduce(NumericsPlan.joined, plans)


def exchange_plans(config: TrainConfig, ranks: RankGroup) -> list[NumericsPlan]:
    """Prepare this process for the run's model; return the plans of all ranks."""
    plans: list[Any] = [None] * ranks.count
    dist.all_gather_object(plans, own_plan(config), group=ranks.group)
    return plans
