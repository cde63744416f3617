"""Metrics to trackers that people already use: each is optional, and none can harm a run."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, get_args

from lockstep.tokens.errors import BadRequest
from lockstep.train.config import SinkName
from lockstep.train.records.metrics import Evaluation, StepMetrics

log = logging.getLogger(__name__)
OnFailure = Callable[[str, str], None]
PROJECT = "lockstep"
NAMES: tuple[SinkName, ...] = get_args(SinkName)


class Sink(Protocol):
    """A tracker: takes numbers of a step, and is closed at the end."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Sinks:
    """The trackers of one run, fed by a thread of their own: a slow one delays no step.

    One that fails gets nothing more, and `on_failure` is told its name and why, once. Nothing is
    lost by it: the run directory has every line already.
    """

    def __init__(self, sinks: Mapping[str, Sink], on_failure: OnFailure) -> None:
        self._sinks = dict(sinks)
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sinks")

    @classmethod
    def open(
        cls,
        names: tuple[str, ...],
        run_dir: Path,
        run_id: str,
        config: Mapping[str, Any],
        on_failure: OnFailure,
    ) -> Sinks:
        """The trackers of these names; one that cannot begin is reported as one that fails."""
        opened: dict[str, Sink] = {}
        for name in dict.fromkeys(names):
            if name == "jsonl":
                continue  # the run directory is written in any case
            try:
                with redirect_stdout(sys.stderr):  # ours belongs to whoever reads the steps
                    opened[name] = SINKS[name](run_dir, run_id, config)
            except Exception as error:
                _report(name, error, on_failure)
        return cls(opened, on_failure)

    def step(self, metrics: StepMetrics) -> None:
        """Hands the numbers of a step over; returns at once."""
        self._log(numbers(metrics), metrics.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Hands an evaluation over; returns at once."""
        values = {"eval/reward": evaluation.reward, "eval/solved": evaluation.solved}
        self._log(values, evaluation.step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if self._sinks:
            self._thread.submit(self._each, lambda sink: sink.log(values, step))

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # whatever a tracker raises, the run goes on
                del self._sinks[name]
                _report(name, error, self._on_failure)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        with redirect_stdout(sys.stderr):
            self._thread.submit(self._each, lambda sink: sink.close())
            self._thread.shutdown()


def _report(name: str, error: Exception, on_failure: OnFailure) -> None:
    why = f"{type(error).__name__}: {error}"
    log.error("%s gets nothing more of this run, which goes on: %s", name, why)
    on_failure(name, why)


def check_sinks(names: Iterable[str]) -> tuple[SinkName, ...]:
    """The names. Raises BadRequest for one that is not known, or whose package is not installed."""
    checked: list[SinkName] = []
    for name in names:
        if name not in NAMES:
            known = ", ".join(NAMES)
            raise BadRequest(f"sink is {name!r}: expected one of {known}", param="sinks")
        for module in MODULES.get(name, ()):
            try:
                importlib.import_module(module)
            except ImportError:
                raise BadRequest(
                    f"the sink {name} is not installed: pip install 'lockstep-rl[{name}]', or "
                    "leave it out",
                    param="sinks",
                ) from None
        checked.append(name)
    return tuple(checked)


def numbers(metrics: StepMetrics) -> dict[str, float]:
    """What can be drawn as a curve."""
    return {
        name: float(value)
        for name, value in metrics.to_json().items()
        if isinstance(value, (int, float)) and name != "step"
    }


class _Wandb:
    """Weights & Biases, as WANDB_MODE, WANDB_PROJECT and its other variables say."""

    def __init__(self, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            id=run_id,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            config=dict(config),
            dir=str(run_dir),
            resume="allow",
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """Event files in the run directory, under tensorboard/."""

    def __init__(self, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        board = importlib.import_module("torch.utils.tensorboard")
        self._writer = board.SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    """Trackio's local database, as TRACKIO_DIR and its other variables say."""

    def __init__(self, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run_id,
            config=dict(config),
            resume="allow",
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """MLflow at MLFLOW_TRACKING_URI, by default a database in the run directory."""

    def __init__(self, run_dir: Path, run_id: str, config: Mapping[str, Any]) -> None:
        mlflow = importlib.import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run_dir / 'mlflow.db'}")
        self._client = mlflow.MlflowClient(uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        earlier = self._client.search_runs([experiment], f"tags.`lockstep.run` = '{run_id}'")
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        run = self._client.create_run(experiment, run_name=run_id, tags={"lockstep.run": run_id})
        self._run = run.info.run_id
        for section, value in config.items():
            self._client.log_param(self._run, section, str(value)[:6000])

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


SINKS: dict[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}
MODULES = {
    "wandb": ("wandb",),
    "tensorboard": ("torch.utils.tensorboard",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""What must be there for each; the extra of the same name installs it."""
