"""What ranks and a process alone do with the same batches, for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.tokens import Sample
from lockstep.train.config import TrainConfig
from lockstep.train.learning.learner import Learner
from lockstep.train.ranks.sharded_learner import ShardedLearner
from lockstep.train.records.run_dir import RunDirectory
from tests.train.rollouts import batch

FACTS = {"step": 2, "played": 7}


def config(run_dir: Path, **sections: Any) -> TrainConfig:
    """Three passes per step: not a multiple of the ranks."""
    learner = {"pass_tokens": 60, "max_grad_norm": 0.1, **sections.pop("learner", {})}
    return TrainConfig.of({"run_dir": str(run_dir), "learner": learner, **sections})


def learn(learner: Learner, run: RunDirectory, samples: list[Sample], first: int) -> dict[str, Any]:
    """Two steps, the second of which is saved; everything that came of them."""
    outcomes = [learner.step(batch(samples), step) for step in (first, first + 1)]
    digests = learner.save_step(run, first + 1, FACTS)
    return {
        "metrics": [dict(own.metrics) for own in outcomes],
        "logprobs": [own.logprobs for own in outcomes],
        "passes": [own.passes for own in outcomes],
        "digests": digests,
    }


def alone(path: Path, samples: list[Sample], **sections: Any) -> dict[str, Any]:
    run = RunDirectory(path / "alone")
    run.start()
    learner = Learner(config(run.path, **sections), exact=True)
    first = learn(learner, run, samples, 1)
    return {"first": first, "second": learn(learner, run, samples, 3)}


def together(rank: int, path: Path, samples: list[Sample], sections: Any) -> dict[str, Any]:
    """The same on ranks; the second half by learners that resume from what the first saved."""
    run = RunDirectory(path / "together")
    if rank == 0:
        run.start()
    dist.barrier()
    options = {"exact": True, "group": dist.group.WORLD}
    learner = ShardedLearner(config(run.path, **sections), **options)
    first = learn(learner, run, samples, 1)
    return {"first": first, "second": resumed(rank, path, samples, sections)}


def resumed(rank: int, path: Path, samples: list[Sample], sections: Any) -> dict[str, Any]:
    run = RunDirectory(path / "together")
    learner = ShardedLearner(
        config(run.path, **sections), exact=True, weights=run.checkpoint(2), group=dist.group.WORLD
    )
    state = learner.load_step(run, 2)
    if {name: state[name] for name in FACTS} != FACTS:
        raise ValueError(f"the facts are {state}")
    if (run.path / "checkpoints" / "step-4").exists():
        run = RunDirectory(path / f"again-{dist.get_world_size()}")
        if rank == 0:
            run.start()
        dist.barrier()
    return learn(learner, run, samples, 3)
