"""The metrics of a step, from what was played and what was learnt."""

from __future__ import annotations

from lockstep.train.learning.batch import TrainBatch
from lockstep.train.learning.learner import StepOutcome
from lockstep.train.records.metrics import StepMetrics

NAMED = ("mismatch_kl", "masked_mismatch_kl", "is_masked", "is_masked_low", "is_masked_high",
         "entropy", "loss", "grad_norm", "lr")  # fmt: skip


def nothing_learnt() -> StepOutcome:
    """What a step without a token to learn from comes to: the weights are as before."""
    return StepOutcome(dict.fromkeys((*NAMED, "mismatch_max"), 0.0), [])


def step_metrics(
    step: int, batch: TrainBatch, learnt: StepOutcome, played: float, trained: float
) -> StepMetrics:
    """All that is known before the weights are published; version, workers and the times of saving
    and updating are added after."""
    mean = sum(batch.rewards) / max(len(batch.rewards), 1)
    variance = sum((reward - mean) ** 2 for reward in batch.rewards) / max(len(batch.rewards), 1)
    values = learnt.metrics
    return StepMetrics(
        step=step,
        reward=mean,
        reward_std=variance**0.5,
        solved=batch.solved,
        tokens=batch.tokens,
        tokens_per_second=batch.tokens / max(played + trained, 1e-9),
        **{name: values[name] for name in NAMED},
        off_policy=batch.off_policy,
        off_policy_max=batch.off_policy_max,
        mixed=batch.mixed,
        breaks=batch.breaks,
        aborts=batch.aborts,
        dropped=batch.dropped,
        retries=batch.retries,
        skipped=int(not batch.learnt_tokens),
        version="",
        pause_seconds=0.0,
        time_rollout=played,
        time_train=trained,
        time_save=0.0,
        time_update=0.0,
        time_step=played + trained,
        workers=(),
        more={name: value for name, value in values.items() if name not in NAMED},
    )
