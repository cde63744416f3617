"""The learning rate of each step."""

from __future__ import annotations

import math

from lockstep.train.config import LearnerConfig


def learning_rate(learner: LearnerConfig, step: int, steps: int) -> float:
    """Return the rate of a step, of a run of `steps` steps.

    It rises linearly over the warmup, and then stays, falls linearly, or falls along half a cosine
    to `lr_min` at the last step of the decay.
    """
    warm = max(learner.warmup_steps, 1)
    if step < warm or learner.schedule == "constant":
        return learner.lr * min(1.0, step / warm)
    end = learner.decay_steps or steps
    progress = min((step - learner.warmup_steps) / max(end - learner.warmup_steps, 1), 1.0)
    left = 1 - progress if learner.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return learner.lr_min + (learner.lr - learner.lr_min) * left
