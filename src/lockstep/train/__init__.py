"""A small training loop on live fleets: policy-gradient losses and on-policy distillation."""

from lockstep.train.config import TrainConfig
from lockstep.train.demo.report_page import write_report
from lockstep.train.envs.environment import (
    Environment,
    Reward,
    RolloutContext,
    Task,
    load_environment,
)
from lockstep.train.loop import Trainer
from lockstep.train.records.step_metrics import Evaluation, RunResult, StepMetrics

__all__ = [
    "Environment",
    "Evaluation",
    "Reward",
    "RolloutContext",
    "RunResult",
    "StepMetrics",
    "Task",
    "TrainConfig",
    "Trainer",
    "load_environment",
    "write_report",
]
