"""Reads what the trackers of a run have stored, with their own packages; prints it as JSON.

Run by the Python of .venv-sinks, with the run directory as its argument.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = dict[str, float]


def tensorboard(run: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {str(scalar.step): scalar.value for scalar in events.Scalars("reward")}


def mlflow(run: Path) -> Rows:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "lockstep"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "reward")
    return {str(metric.step): metric.value for metric in history}


def trackio(run: Path) -> Rows:
    path = run.parent / "trackio" / "lockstep.db"
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    return {
        str(step): values["reward"]
        for step, values in ((step, json.loads(raw)) for step, raw in rows)
        if "reward" in values
    }


def wandb(run: Path) -> Rows:
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    store, rows = DataStore(), {}
    store.open_for_scan(str(path))
    while (raw := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") != "history":
            continue
        values = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        if "reward" in values:
            rows[str(int(values["_step"]))] = values["reward"]
    return rows


READERS: dict[str, Callable[[Path], Any]] = {
    "tensorboard": tensorboard, "mlflow": mlflow, "trackio": trackio, "wandb": wandb,
}  # fmt: skip

if __name__ == "__main__":
    run = Path(sys.argv[1])
    print(json.dumps({name: read(run) for name, read in READERS.items()}))
