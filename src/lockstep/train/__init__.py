"""A small training loop on live fleets: policy-gradient losses and on-policy distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy_names import import_on_use

if TYPE_CHECKING:
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
else:
    # The command line reads the demo's options for its flags, and must not import torch for that.
    __getattr__ = import_on_use(
        __name__,
        {
            "CALC_TOOL": "envs.bundled",
            "Calc": "envs.bundled",
            "Environment": "envs.environment",
            "Evaluation": "records.step_metrics",
            "Reverse": "envs.bundled",
            "Reward": "envs.environment",
            "RolloutContext": "envs.environment",
            "RunResult": "records.step_metrics",
            "StepMetrics": "records.step_metrics",
            "Task": "envs.environment",
            "TrainConfig": "config",
            "Trainer": "loop",
            "load_environment": "envs.environment",
            "run_calc": "envs.bundled",
            "write_report": "demo.report_page",
        },
    )

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
