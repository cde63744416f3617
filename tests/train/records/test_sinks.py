"""Sinks: a missing package is an error at the start, a failure during the run is not."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep.tokens.errors import BadRequest
from lockstep.train import TrainConfig
from lockstep.train.records import sinks
from lockstep.train.records.sinks import Sinks, check_sinks
from lockstep.train.records.step_metrics import Evaluation
from tests.train.conftest import Stack, run_config


class Recorder:
    """A sink in memory that can fail at one step."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.breaks_at = breaks_at
        self.closed = False

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step == self.breaks_at:
            raise ConnectionError("the tracker went away")
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_an_unknown_sink_is_an_error_that_lists_the_sinks() -> None:
    with pytest.raises(BadRequest, match="'neptune': expected one of jsonl, wandb, tensorboard"):
        check_sinks(("neptune",))
    with pytest.raises(BadRequest, match=r"sinks\[1\] is 'neptune'"):
        TrainConfig.of({"sinks": ["jsonl", "neptune"]})


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "trackio", "mlflow"])
def test_a_sink_that_is_not_installed_is_an_error_that_names_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sinks.MODULES, name, ("no_such_module",))
    with pytest.raises(BadRequest, match=rf"pip install 'lockstep-rl\[{name}\]'") as caught:
        check_sinks(("jsonl", name))
    assert caught.value.param == "sinks"


async def test_a_run_with_a_missing_sink_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.train import Trainer

    monkeypatch.setitem(sinks.MODULES, "wandb", ("no_such_module",))
    config = run_config(tmp_path / "run", sinks=["wandb"])
    with pytest.raises(BadRequest, match="'wandb' is not installed"):
        await Trainer(config, "http://127.0.0.1:9", "http://127.0.0.1:9", "no-token").run()
    assert not (tmp_path / "run").exists()


@pytest.mark.failure_mode("F91")
async def test_a_sink_that_fails_is_reported_once_and_the_run_continues(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Recorder(), Recorder(breaks_at=2)
    made = {"wandb": lambda *_: good, "trackio": lambda *_: bad}
    monkeypatch.setattr(sinks, "SINKS", made)
    monkeypatch.setattr(sinks, "MODULES", {})
    config = run_config(tmp_path / "run", sinks=["jsonl", "wandb", "trackio"], loop={"steps": 4})
    with caplog.at_level(logging.ERROR, "lockstep.train.records.sinks"):
        result = await stack.trainer(config).run()
    assert [metrics.step for metrics in result.steps] == [1, 2, 3, 4]
    assert [step for step, _ in bad.rows] == [1], "a failed sink is dropped"
    assert [step for step, values in good.rows if "reward" in values] == [1, 2, 3, 4]
    assert good.closed
    assert len(caplog.records) == 1
    events = rows(tmp_path / "run" / "events.jsonl")
    failed = [event for event in events if event["kind"] == "sink_failed"]
    assert [(event["sink"], event["reason"]) for event in failed] == [
        ("trackio", "ConnectionError: the tracker went away")
    ]
    lines = rows(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4], "nothing is lost locally"
    assert [values["reward"] for _, values in good.rows if "reward" in values] == [
        line["reward"] for line in lines
    ]


def test_a_sink_that_cannot_be_opened_is_reported_and_the_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> Recorder:
        raise PermissionError("no key")

    good, told = Recorder(), []
    monkeypatch.setattr(sinks, "SINKS", {"wandb": refuses, "mlflow": lambda *_: good})
    with Sinks.open(
        ("wandb", "mlflow"), tmp_path, "run-1", {}, lambda name, why: told.append((name, why))
    ) as opened:
        opened.evaluation(Evaluation(step=0, reward=0.5, solved=0.25, prompts=4))
    assert told == [("wandb", "PermissionError: no key")]
    assert good.rows == [(0, {"eval/reward": 0.5, "eval/solved": 0.25})]


def test_a_slow_sink_delays_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    class Slow(Recorder):
        def log(self, values: Mapping[str, float], step: int) -> None:
            gate.wait(30)
            super().log(values, step)

    slow = Slow()
    monkeypatch.setattr(sinks, "SINKS", {"mlflow": lambda *_: slow})
    with Sinks.open(("mlflow",), tmp_path, "run-1", {}, lambda *_: None) as opened:
        opened.evaluation(Evaluation(step=3, reward=0.5, solved=0.25, prompts=4))
        assert slow.rows == [], "it returned before the tracker did"
        gate.set()
    assert [step for step, _ in slow.rows] == [3]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
