"""A mismatch in a run is explained once: in the run directory, its events, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lockstep.engine.forward_pass import tempered_logprobs
from lockstep.run_record import describe
from lockstep.tokens.errors import Conflict
from lockstep.train.learning import item_logprobs
from tests.train.conftest import Stack, run_config

SMALL: dict[str, Any] = {"rollout": {"groups": 2, "group_size": 4, "max_tokens": 16}}


@pytest.fixture
def another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer divides its logits by a temperature that nobody sampled with."""

    def tempered(logits: Tensor, temperature: float = 1.0) -> Tensor:
        return tempered_logprobs(logits, temperature * 0.8)

    monkeypatch.setattr(item_logprobs, "tempered_logprobs", tempered)


@pytest.mark.failure_mode("F78")
async def test_the_cause_is_in_the_run_directory(
    stack: Stack, tmp_path: Path, another_temperature: None
) -> None:
    run = tmp_path / "run"
    await stack.trainer(run_config(run, **SMALL, loop={"steps": 2})).run()
    explanation = json.loads((run / "explanation.json").read_text())
    assert (explanation["step"], explanation["outcome"]) == (1, "explained")
    assert explanation["causes"][0]["name"] == "temperature"
    assert explanation["causes"][0]["side"] == "trainer"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "explanation"]
    assert "temperature 0.8" in describe(event)


async def test_a_run_stops_where_that_was_asked_for(
    stack: Stack, tmp_path: Path, another_temperature: None
) -> None:
    config = run_config(tmp_path / "run", **SMALL, loop={"steps": 2, "explain": "stop"})
    with pytest.raises(Conflict, match=r"loop.explain is stop.*temperature 0.8"):
        await stack.trainer(config).run()


async def test_a_healthy_run_explains_nothing(stack: Stack, tmp_path: Path) -> None:
    await stack.trainer(run_config(tmp_path / "run", **SMALL, loop={"steps": 2})).run()
    assert not (tmp_path / "run" / "explanation.json").exists()
