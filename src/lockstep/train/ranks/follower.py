"""A rank other than 0: does what rank 0 announces, until the run ends."""

from __future__ import annotations

from lockstep.train.ranks.leader import END, OPEN, PLAN, exchange_plans
from lockstep.train.ranks.rank_group import RankGroup
from lockstep.train.ranks.sharded_learner import ShardedLearner

TASKS = ("step", "save_step", "load_step", "digests")
"""The methods of a learner that rank 0 announces."""


def follow(ranks: RankGroup) -> None:
    """Take part in the run. Raises Unavailable that names a rank which is lost."""
    learner: ShardedLearner | None = None
    while True:
        task, arguments = ranks.next_command()
        if task == END:
            return
        with ranks.working(f"at {task!r}"):
            if task == PLAN:
                (config,) = arguments
                exchange_plans(config, ranks)
            elif task == OPEN:
                config, exact, weights = arguments
                learner = ShardedLearner(config, exact=exact, weights=weights, group=ranks.group)
            elif learner is not None and task in TASKS:
                getattr(learner, task)(*arguments)
            else:
                raise RuntimeError(f"rank 0 announced {task!r}, which is no task of a rank")
