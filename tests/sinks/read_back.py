"""Reads what the trackers of a run have stored, with their own packages; prints it as JSON.

Run by the Python of .venv-sinks, with the run directory as its argument.
"""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
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


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which wandb's offline runs are."""
    at, parts = 7, []  # after wandb's own header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of several
            yield b"".join(parts)
            parts = []


def wandb(run: Path) -> Rows:
    from wandb.proto import wandb_internal_pb2

    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    rows: Rows = {}
    for raw in _log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(raw)
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
