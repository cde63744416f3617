"""The values that a run reports: metrics of each step, evaluations, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.train.learning.batch import TrainBatch
from lockstep.train.learning.exactness import Exactness
from lockstep.train.learning.learner import StepOutcome

NAMED = ("mismatch_kl", "masked_mismatch_kl", "is_masked", "is_masked_low", "is_masked_high",
         "entropy", "loss", "grad_norm", "lr")  # fmt: skip
"""Metrics that every learner has; others come with some losses only."""
COUNTED = ("solved", "tokens", "off_policy", "off_policy_max", "mixed", "breaks", "aborts",
           "dropped", "retries")  # fmt: skip
"""What a batch counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step. `off_policy` is the mean age of the tokens learnt from, in updates.

    `tokens` were sampled for this step, `tokens_per_second` is their number over the whole step.
    `version` is what the fleet serves after it. `skipped` is 1 when no token could be learnt from.
    """

    step: int
    reward: float
    reward_std: float
    solved: float
    tokens: int
    tokens_per_second: float
    mismatch_kl: float
    masked_mismatch_kl: float
    is_masked: float
    is_masked_low: float
    is_masked_high: float
    entropy: float
    loss: float
    grad_norm: float
    lr: float
    off_policy: float
    off_policy_max: int
    mixed: int
    breaks: int
    aborts: int
    dropped: int
    retries: int
    version: str = ""
    pause_seconds: float = 0.0
    time_rollout: float
    time_train: float
    time_save: float = 0.0
    time_update: float = 0.0
    time_step: float
    workers: tuple[Mapping[str, Any], ...] = ()
    skipped: int = 0
    more: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The step as a flat object; times are under time/rollout and the like."""
        plain: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.startswith("time_"):
                plain["time/" + each.name.removeprefix("time_")] = value
            elif each.name == "workers":
                plain["workers"] = [dict(worker) for worker in value]
            elif each.name != "more":
                plain[each.name] = value
        return {**plain, **self.more}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> StepMetrics:
        """The step of a line that `to_json` made."""
        names = {each.name for each in fields(cls)} - {"more", "workers"}
        values = {name.replace("time/", "time_"): value for name, value in plain.items()}
        known = {name: value for name, value in values.items() if name in names}
        more = {n: v for n, v in plain.items() if n.replace("time/", "time_") not in names}
        workers = tuple(more.pop("workers", ()))
        return cls(**known, workers=workers, more=more)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How the policy does on held-out prompts."""

    step: int
    reward: float
    solved: float
    prompts: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run. `steps` are those that this process took."""

    run_dir: str
    version: str
    before: Evaluation | None
    after: Evaluation | None
    steps: tuple[StepMetrics, ...]
    exactness: Exactness

    @property
    def max_difference(self) -> float:
        """The furthest that a logprob of the trainer was from the engine's, in any step."""
        return max((step.more.get("mismatch_max", 0.0) for step in self.steps), default=0.0)


def nothing_learnt() -> StepOutcome:
    """The outcome of a step without a token to learn from: the weights are as before."""
    return StepOutcome(dict.fromkeys((*NAMED, "mismatch_max"), 0.0), [])


def step_metrics(
    step: int, batch: TrainBatch, outcome: StepOutcome, rollout_seconds: float, train_seconds: float
) -> StepMetrics:
    """All that is known of a step before its weights are saved and published."""
    count = max(len(batch.rewards), 1)
    mean = sum(batch.rewards) / count
    variance = sum((reward - mean) ** 2 for reward in batch.rewards) / count
    seconds = rollout_seconds + train_seconds
    values: dict[str, Any] = {name: outcome.metrics[name] for name in NAMED}
    values |= {name: getattr(batch, name) for name in COUNTED}
    return StepMetrics(
        step=step,
        reward=mean,
        reward_std=variance**0.5,
        tokens_per_second=batch.tokens / max(seconds, 1e-9),
        **values,
        skipped=int(not batch.learnt_tokens),
        time_rollout=rollout_seconds,
        time_train=train_seconds,
        time_step=seconds,
        more={name: value for name, value in outcome.metrics.items() if name not in NAMED},
    )
