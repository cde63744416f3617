"""The options of the demo, and their command-line flags. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from lockstep.flags import Flag, check_ranges

if TYPE_CHECKING:
    from lockstep.train.config import TrainConfig

LORA_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """The options of a demo. `run_dir` must not hold a run; the report goes there by default."""

    run_dir: Path
    task: Annotated[
        Literal["calc", "reverse", "guess"],
        Flag("What the model learns: to call a calculator, reverse digits, or guess a number."),
    ] = "calc"
    moe: Annotated[
        bool, Flag("Use a mixture-of-experts model, and replay its routing when training.")
    ] = False
    lora: Annotated[bool, Flag("Train a LoRA adapter instead of all weights.")] = False
    seed: Annotated[int, Flag("Seed of the prompts and of sampling.")] = 1
    steps: Annotated[int, Flag("Training steps.", min=1)] = 32
    groups: Annotated[int, Flag("Prompts per step, with 8 rollouts each.", min=1)] = 16
    group_size: int = 8
    eval_prompts: Annotated[
        int, Flag("Held-out prompts to evaluate on before and after; 0: none.", min=0)
    ] = 128
    exact: Annotated[bool, Flag("Fail unless trainer and workers compute the same bits.")] = False
    worker_args: tuple[str, ...] = ()
    report: Annotated[
        Path | None, Flag("Path of the HTML report; by default report.html in the run directory.")
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def model(self) -> str:
        return "tiny-moe" if self.moe else "tiny"

    @property
    def config(self) -> TrainConfig:
        """The configuration of the run. An adapter needs a higher learning rate."""
        from lockstep.train.config import (
            EnvConfig,
            EvalConfig,
            LearnerConfig,
            LoopConfig,
            RolloutConfig,
            TrainConfig,
        )

        return TrainConfig(
            model=self.model,
            run_dir=str(self.run_dir),
            seed=self.seed,
            env=EnvConfig(name=self.task),
            rollout=RolloutConfig(
                groups=self.groups,
                group_size=self.group_size,
                experts=self.moe,
                samples_shown=6,
            ),
            learner=LearnerConfig(
                lr=1e-3 if self.lora else 1e-4,
                lora_rank=LORA_RANK if self.lora else 0,
                exact=self.exact or None,
            ),
            loop=LoopConfig(steps=self.steps),
            eval=EvalConfig(prompts=self.eval_prompts),
        )
