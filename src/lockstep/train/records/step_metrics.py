"""The values that a run reports: metrics of each step, evaluations and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lockstep.train.learning.batch import TrainBatch
from lockstep.train.learning.exactness import Exactness
from lockstep.train.learning.learner import StepOutcome

NAMED = ("mismatch_kl", "masked_mismatch_kl", "is_masked", "is_masked_low", "is_masked_high",
         "entropy", "loss", "grad_norm", "lr")  # fmt: skip
"""Metrics of the learner that are fields of StepMetrics; others go into `more`."""
COMPARED = ("mismatch_max", "compared_logprobs", "unequal_logprobs")
"""Metrics in `more` that compare the trainer's logprobs with the engine's, token by token."""
COUNTED = ("solved", "tokens", "off_policy", "off_policy_max", "mixed", "breaks", "aborts",
           "dropped", "retries")  # fmt: skip
"""Counts of the batch that are fields of StepMetrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The metrics of one step.

    `off_policy` is the mean age in updates of the tokens learnt from. `tokens` were sampled for the
    step, and `tokens_per_second` divides them by the duration of the whole step. The fleet serves
    `version` after it. `skipped` is 1 when there was no token to learn from.
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
        """Return the step as a flat object; times have names such as time/rollout."""
        plain: dict[str, Any] = {}
        for name in (own.name for own in fields(self)):
            value = getattr(self, name)
            if name.startswith("time_"):
                plain["time/" + name.removeprefix("time_")] = value
            elif name == "workers":
                plain["workers"] = [dict(worker) for worker in value]
            elif name != "more":
                plain[name] = value
        return {**plain, **self.more}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> StepMetrics:
        """Return the step of an object that `to_json` made."""
        names = {own.name for own in fields(cls)} - {"more", "workers"}
        fields_of = {name: name.replace("time/", "time_") for name in plain}
        own = {fields_of[name]: plain[name] for name in plain if fields_of[name] in names}
        more = {name: plain[name] for name in plain if fields_of[name] not in names}
        workers = tuple(more.pop("workers", ()))
        return cls(**own, workers=workers, more=more)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward and share of solved tasks on held-out prompts, after `step`."""

    step: int
    reward: float
    solved: float
    prompts: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run. `steps` are those of this process, not of one it resumed."""

    run_dir: str
    version: str
    before: Evaluation | None
    after: Evaluation | None
    steps: tuple[StepMetrics, ...]
    exactness: Exactness

    @property
    def max_difference(self) -> float:
        """The largest difference of trainer and engine logprobs in any step."""
        return max((step.more.get("mismatch_max", 0.0) for step in self.steps), default=0.0)


def nothing_learnt() -> StepOutcome:
    """Return the outcome of a step without a token to learn from."""
    return StepOutcome(dict.fromkeys((*NAMED, *COMPARED), 0.0), [])


def step_metrics(
    step: int, batch: TrainBatch, outcome: StepOutcome, rollout_seconds: float, train_seconds: float
) -> StepMetrics:
    """Return the metrics of a step before its weights are saved and published."""
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
        more={name: value for name, value in outcome.metrics.items() if name not in NAMED}
        | ({"uniform": batch.uniform} if batch.uniform else {}),
    )
