"""`--logprobs-mode`: what workers are started with, and what the gateway takes them to compute."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep import cli
from lockstep.cli.serving.server_workers import LaunchedServers, RunningServers
from lockstep.cli.serving.sources import EmbeddedWorkers
from lockstep.launch import interpreter


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the workers would come from; nothing is started."""
    found: list[Any] = []

    class Process:
        def __init__(self, source: Any, *_: Any) -> None:
            found.append(source)

        def run(self) -> None:
            pass

    # The package has a command of the module's name, so the module is found by importing it.
    monkeypatch.setattr(import_module("lockstep.cli.serve"), "GatewayProcess", Process)
    monkeypatch.setattr(interpreter, "find_python", lambda *_: "python")
    return found


def run(*arguments: str) -> int:
    return CliRunner().invoke(cli.app, ["serve", *arguments]).exit_code


def test_embedded_workers_get_the_mode_that_was_chosen(sources: list[Any]) -> None:
    assert run("tiny") == run("tiny", "--logprobs-mode", "raw") == 0
    default, raw = sources
    assert isinstance(default, EmbeddedWorkers)
    assert default.arguments == ()
    assert raw.arguments == ("--logprobs-mode", "raw")


@pytest.mark.failure_mode("F71")
def test_vllm_servers_compute_processed_ones_unless_told_otherwise(sources: list[Any]) -> None:
    assert run("tiny", "--engine", "vllm") == 0
    assert run("tiny", "--engine", "vllm", "--logprobs-mode", "raw") == 0
    assert all(isinstance(source, LaunchedServers) for source in sources)
    assert [source.logprob_mode for source in sources] == ["processed", "raw"]


def test_servers_that_run_already_are_what_the_caller_says(sources: list[Any]) -> None:
    url = ("--engine", "vllm", "--worker", "http://127.0.0.1:1")
    assert run("tiny", *url) == run("tiny", *url, "--logprobs-mode", "processed") == 0
    assert all(isinstance(source, RunningServers) for source in sources)
    assert [source.logprob_mode for source in sources] == [None, "processed"]


def test_the_mode_behind_the_dashes_would_not_be_known_to_the_gateway(sources: list[Any]) -> None:
    assert run("tiny", "--engine", "vllm", "--", "--logprobs-mode", "raw_logprobs") != 0
    assert not sources
