"""A small training loop on live fleets: GRPO and on-policy distillation."""

from lockstep.train.config import TrainConfig
from lockstep.train.demo.report_page import write_report
from lockstep.train.envs.environment import Environment, Player, Reward, Task, load_environment
from lockstep.train.loop import Trainer
from lockstep.train.records.metrics import Evaluation, RunResult, StepMetrics

__all__ = [
    "Environment",
    "Evaluation",
    "Player",
    "Reward",
    "RunResult",
    "StepMetrics",
    "Task",
    "TrainConfig",
    "Trainer",
    "load_environment",
    "write_report",
]
