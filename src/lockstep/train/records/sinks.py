"""Experiment trackers that receive the metrics of a run. A tracker that fails never stops a run."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol, get_args

from lockstep.tokens.errors import BadRequest
from lockstep.train.config import SinkName
from lockstep.train.records.step_metrics import Evaluation, StepMetrics

log = logging.getLogger(__name__)
OnFailure = Callable[[str, str], None]
PROJECT = "lockstep"
NAMES: tuple[SinkName, ...] = get_args(SinkName)


class Sink(Protocol):
    """A tracker: logs the numbers of a step, and is closed at the end."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Sinks:
    """The trackers of one run, called in a thread of their own so that they delay no step.

    A tracker that fails is dropped, and `on_failure(name, reason)` is called once. No data is lost:
    the run directory has every line.
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
        """Open the trackers of these names. A tracker that cannot be opened counts as failed."""
        opened: dict[str, Sink] = {}
        for name in dict.fromkeys(names):
            if name == "jsonl":
                continue  # RunDirectory writes it
            try:
                with redirect_stdout(sys.stderr):  # stdout is for the lines of the run
                    opened[name] = SINKS[name](run_dir, run_id, config)
            except Exception as error:
                _report(name, error, on_failure)
        return cls(opened, on_failure)

    def step(self, metrics: StepMetrics) -> None:
        """Queue the numbers of a step and return immediately."""
        self._log(numbers(metrics), metrics.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Queue an evaluation and return immediately."""
        values = {"eval/reward": evaluation.reward, "eval/solved": evaluation.solved}
        self._log(values, evaluation.step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if self._sinks:
            self._thread.submit(self._call_all, lambda sink: sink.log(values, step))

    def _call_all(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # a tracker must not end the run
                del self._sinks[name]
                _report(name, error, self._on_failure)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        with redirect_stdout(sys.stderr):
            self._thread.submit(self._call_all, lambda sink: sink.close())
            self._thread.shutdown()


def _report(name: str, error: Exception, on_failure: OnFailure) -> None:
    reason = f"{type(error).__name__}: {error}"
    log.error("sink %s failed and is dropped; the run continues: %s", name, reason)
    on_failure(name, reason)


def check_sinks(names: Iterable[str]) -> tuple[SinkName, ...]:
    """Return the names. Raises BadRequest for an unknown name or a missing package."""
    checked: list[SinkName] = []
    for name in names:
        if name not in NAMES:
            raise BadRequest(f"sink is {name!r}: expected one of {', '.join(NAMES)}", param="sinks")
        for module in MODULES.get(name, ()):
            try:
                importlib.import_module(module)
            except ImportError:
                raise BadRequest(
                    f"the sink {name!r} is not installed: pip install 'lockstep-rl[{name}]', or "
                    "remove it from sinks",
                    param="sinks",
                ) from None
        checked.append(name)
    return tuple(checked)


def numbers(metrics: StepMetrics) -> dict[str, float]:
    """Return the numeric metrics of a step."""
    return {
        name: float(value)
        for name, value in metrics.to_json().items()
        if isinstance(value, (int, float)) and name != "step"
    }


class _Wandb:
    """Weights & Biases, configured by WANDB_MODE, WANDB_PROJECT and its other variables."""

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
    """Trackio's local database, configured by TRACKIO_DIR and its other variables."""

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
        existing = self._client.get_experiment_by_name(name)
        if existing is None:
            experiment = self._client.create_experiment(name)
        else:
            experiment = existing.experiment_id
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
"""Modules that each sink imports; the extra of the same name installs them."""
