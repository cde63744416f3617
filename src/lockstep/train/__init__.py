"""A small training loop on live fleets: policy-gradient losses and on-policy distillation."""

from lockstep.train.config import TrainConfig
from lockstep.train.demo.report_page import write_report
from lockstep.train.envs.bundled import CALC_TOOL, Calc, Reverse, run_calc
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
    "CALC_TOOL",
    "Calc",
    "Environment",
    "Evaluation",
    "Reverse",
    "Reward",
    "RolloutContext",
    "RunResult",
    "StepMetrics",
    "Task",
    "TrainConfig",
    "Trainer",
    "load_environment",
    "run_calc",
    "write_report",
]
