"""`lockstep serve` on machines with GPUs: which of them each worker gets, and what is refused."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lockstep import cli
from lockstep.launch import interpreter
from tests.launch.machines import write_nvidia_smi, write_recorder

CUDA = ("--worker-args", "--device cuda")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where the workers would come from, on a machine with eight GPUs; nothing is started."""
    sources: list[Any] = []

    class Process:
        def __init__(self, source: Any, *_: Any) -> None:
            sources.append(source)

        def run(self) -> None:
            pass

    python, _ = write_recorder(tmp_path / "environment")
    write_nvidia_smi(tmp_path, 8)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for command in ("serve", "tinker"):
        module = import_module(f"lockstep.cli.{command}")
        monkeypatch.setattr(module, "GatewayProcess", Process)
    monkeypatch.setattr(interpreter, "find_python", lambda *_: python)
    return sources


def serve(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["serve", "tiny", *arguments])


def groups(source: Any) -> list[str]:
    return [",".join(source.placement.ids(at)) for at in range(source.count)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--workers", "8", *CUDA), ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (("--workers", "2", "--gpus", "4-5", *CUDA), ["4", "5"]),
        (("--workers", "2", "--gpus", "6,6", *CUDA), ["6", "6"]),
        (
            ("--engine", "vllm", "--workers", "4", "--", "--tensor-parallel-size", "2"),
            ["0,1", "2,3", "4,5", "6,7"],
        ),
        (
            ("--engine", "vllm", "--workers", "2", "--gpus", "0-3", "--", "-tp=2"),
            ["0,1", "2,3"],
        ),
    ],
)
def test_each_worker_gets_its_own_gpus(
    sources: list[Any], arguments: tuple[str, ...], expected: list[str]
) -> None:
    result = serve(*arguments)
    assert result.exit_code == 0, result.output
    assert groups(sources[0]) == expected


def test_the_workers_of_a_tinker_server_are_placed_too(sources: list[Any]) -> None:
    vllm = ("--engine", "vllm", "--workers", "2", "--gpus", "4-7", "--", "-tp=2")
    result = CliRunner().invoke(cli.app, ["tinker", "tiny", *vllm])
    assert result.exit_code == 0, result.output
    assert groups(sources[0]) == ["4,5", "6,7"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workers", "9"),  # on the CPU
        ("--workers", "2", "--gpus", "none", *CUDA),
        ("--workers", "2", "--worker-args", "--device cuda:3"),
        ("--engine", "vllm", "--", "-tp", "16", "--distributed-executor-backend", "ray"),
    ],
)
def test_workers_that_need_no_placement_get_none(
    sources: list[Any], arguments: tuple[str, ...]
) -> None:
    result = serve(*arguments)
    assert result.exit_code == 0, result.output
    assert sources[0].placement is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "9", *CUDA), "9 workers with 1 GPU each need 9, but 8 are visible"),
        (
            ("--engine", "vllm", "--workers", "5", "--", "-tp", "2"),
            "5 workers with 2 GPUs each need 10, but 8 are visible",
        ),
        (("--gpus", "0"), "the device of these is cpu"),
        (("--gpus", "9", *CUDA), "--gpus names GPU 9, but 8 are visible"),
        (
            ("--gpus", "0", "--worker-args", "--device cuda --kv-cache-mb 90000"),
            "GPU 0 has 80,000 MiB free, but its worker needs 90,",
        ),
        (
            ("--engine", "vllm", "--worker", "http://127.0.0.1:1", "--gpus", "0"),
            "leave out one of --gpus and --worker",
        ),
    ],
)
@pytest.mark.usefixtures("sources")
def test_what_the_gpus_cannot_hold_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str
) -> None:
    result = serve(*arguments)
    assert result.exit_code != 0
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
