"""Metrics to trackers that people already use, where these are installed."""

from __future__ import annotations

import importlib
from typing import Any, Literal, Protocol

from lockstep.tokens.errors import BadRequest
from lockstep.train.config import TrainConfig
from lockstep.train.records.metrics import StepMetrics

SinkName = Literal["wandb", "tensorboard"]


class Sink(Protocol):
    def step(self, metrics: StepMetrics) -> None: ...
    def close(self) -> None: ...


def open_sink(name: str, config: TrainConfig) -> Sink:
    """Raises BadRequest when the tracker is not known or not installed."""
    if name not in ("wandb", "tensorboard"):
        raise BadRequest(f"tracker is {name!r}: expected wandb or tensorboard", param="track")
    return _Wandb(config) if name == "wandb" else _TensorBoard(config)


class _Wandb:
    def __init__(self, config: TrainConfig) -> None:
        wandb = _imported("wandb", "wandb")
        self._run = wandb.init(config=config.to_dict(), dir=config.run_dir, resume="allow")

    def step(self, metrics: StepMetrics) -> None:
        self._run.log(numbers(metrics), step=metrics.step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, config: TrainConfig) -> None:
        board = _imported("torch.utils.tensorboard", "tensorboard")
        self._writer = board.SummaryWriter(f"{config.run_dir}/tensorboard")

    def step(self, metrics: StepMetrics) -> None:
        for name, value in numbers(metrics).items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._writer.close()


def numbers(metrics: StepMetrics) -> dict[str, float]:
    """What can be drawn as a curve."""
    return {
        name: float(value)
        for name, value in metrics.to_json().items()
        if isinstance(value, (int, float)) and name != "step"
    }


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise BadRequest(
            f"{package} is not installed: pip install {package}, or leave --track out",
            param="track",
        ) from None
