"""Exact or close: whether trainer and workers compute the same bits, decided before the first step.

If they cannot, the run continues in close mode and records the reason. In close mode logprobs under
equal weights may differ by `CLOSE_BOUND`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.backends.transport import ModelCard
from lockstep.checkpoint.probe import builtin
from lockstep.client.policy import connect
from lockstep.client.turn import Scores
from lockstep.tokens.errors import Conflict, NotExact
from lockstep.tokens.numerics import NumericsPlan
from lockstep.train.config import LearnerConfig, TrainConfig
from lockstep.train.learning.learner import Learner
from lockstep.train.retry import RetryPolicy

CLOSE_BOUND = {"float32": 1e-3, "bfloat16": 0.5}
"""Maximum difference of trainer and engine logprobs in close mode, by the trainer's dtype.

Correct implementations differ by up to 3e-5 in float32 and 0.05 in bfloat16. A wrong token, a stale
weight or another temperature causes 0.01 to several nats in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """The mode of a run: exact if trainer and workers have the same numerics plan, else close.

    `reason` says why a run is close. `workers` is None if they do not report their plan.
    """

    mode: Literal["exact", "close"]
    reason: str
    bound: float
    trainer: NumericsPlan
    workers: NumericsPlan | None

    @classmethod
    def between(
        cls, trainer: NumericsPlan, workers: NumericsPlan | None, learner: LearnerConfig
    ) -> Exactness:
        """Return the mode for these plans under this config.

        Raises NotExact with the reason if `learner.exact` is true and the plans differ.
        """
        reason = _difference(trainer, workers)
        if reason and learner.exact:
            raise NotExact(
                f"learner.exact (--exact) is set, but this run cannot be exact: {reason}; leave it "
                "out to train in close mode (`lockstep doctor` shows what this machine can do)",
                param="learner.exact",
            )
        if learner.exact is False:
            reason = "learner.exact is false"
        return cls(
            mode="close" if reason else "exact",
            reason=reason,
            bound=CLOSE_BOUND[learner.dtype] if reason else 0.0,
            trainer=trainer,
            workers=workers,
        )

    @property
    def is_exact(self) -> bool:
        return self.mode == "exact"

    def to_json(self) -> dict[str, Any]:
        """Return the value of `numerics` in run.json."""
        return {
            "mode": self.mode,
            "reason": self.reason,
            "bound": self.bound,
            "trainer": self.trainer.to_json(),
            "workers": None if self.workers is None else self.workers.to_json(),
        }


def base_card(cards: list[ModelCard], model: str | None) -> ModelCard | None:
    """Return the card of the base model `model`, or the first base model without such a name."""
    bases = [card for card in cards if card.parent is None]
    named = [card for card in bases if card.id == model]
    return next(iter(named or bases), None)


async def check_base(learner: Learner, url: str, config: TrainConfig, retry: RetryPolicy) -> None:
    """Raise Conflict unless trainer and fleet have the same base weights.

    Without this check the fleet would quarantine every worker at the first adapter update.
    """
    model = learner.model
    text = model.config.get_text_config()
    ids = list(builtin(text.vocab_size, text.max_position_embeddings)[1])
    ours = await asyncio.to_thread(learner.base_logprobs, ids)
    async with connect(url, config.serve.model, api_key=config.serve.api_key) as base:
        scores = await retry.call("score", lambda _: base.score(ids))
    tolerance = config.learner.probe_tolerance
    if tolerance is None:
        tolerance = 0.0 if learner.exact else CLOSE_BOUND[config.learner.dtype]
    check_same_base(ours, scores, tolerance, config.model)


def check_same_base(ours: list[float], scores: Scores, tolerance: float, model: str) -> None:
    """Raise Conflict unless the fleet's scores equal the trainer's, which are without the adapter.

    `ours` are the logprobs of the tokens after the first.
    """
    worst = max(abs(a - b) for a, b in zip(ours, scores.logprobs[1:], strict=True))
    if worst > tolerance:
        raise Conflict(
            f"the fleet serves version {scores.version!r}, whose logprobs differ by up to "
            f"{worst:.3g} from those of model {model!r}: an adapter trained on one does not "
            "fit the other; serve that model, or push its weights first",
            param="model",
        )


def _difference(trainer: NumericsPlan, workers: NumericsPlan | None) -> str:
    if not trainer.is_exact:
        return f"the trainer does not compute exactly ({trainer.reason or 'no reason given'})"
    if workers is None:
        return "the workers do not report their numerics (only embedded engines do)"
    if not workers.is_exact:
        return f"the workers do not compute exactly ({workers.reason or 'no reason given'})"
    return trainer.mismatch(workers) or ""
