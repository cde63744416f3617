"""Checks of ports, directories and the CPU report what is there."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from lockstep.doctor import engines, host
from lockstep.doctor.examine import child
from lockstep.doctor.gpus import gpus
from lockstep.running_gateways import RunningGateway, registered
from tests.launch.machines import write_nvidia_smi

INTEL = """processor : 0
model name : Intel(R) Xeon(R) Processor
flags : fpu sse4_2 avx2 avx512f amx_bf16

processor : 1
model name : something else
"""


def test_a_port_in_use_names_its_process_and_the_option() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        number = held.getsockname()[1]
        check = host.port(number, "--port")
    assert (check.name, check.status) == (f"port {number}", "note")
    assert f"held by process {os.getpid()}" in check.found
    assert "lockstep serve --port PORT" in check.way_out
    assert host.port(number, "--port").status == "ok"


def test_the_cpu_is_named_with_the_instructions_it_lists(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(INTEL)
    shown = host.cpu(tmp_path / "cpuinfo").found
    assert shown.startswith("Intel(R) Xeon(R) Processor, ")
    assert shown.endswith(" cores, sse4_2 avx2 avx512f amx_bf16")
    assert "cores" in host.cpu(tmp_path / "absent").found


def test_directories_are_checked_by_writing_and_not_created(tmp_path: Path) -> None:
    good = host.state_directory(tmp_path / "a" / "lockstep")
    assert good.status == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    bad = host.state_directory(tmp_path / "file")
    assert (bad.status, "XDG_STATE_HOME" in bad.way_out) == ("note", True)
    run = host.run_directory(tmp_path / "file")
    assert (run.status, "--run-dir" in run.way_out) == ("fail", True)


def test_an_engine_is_found_in_its_environment_or_reported_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    absent = next(engines.optional_engines())
    assert (absent.status, absent.found) == ("note", "not found (optional)")
    assert "scripts/install-vllm.sh" in absent.way_out
    here = engines._in_environment("this", "lockstep-rl", Path(sys.executable), "")
    assert here.status == "ok"
    assert here.found.endswith(f"in {Path(sys.executable).parent.parent}")


def test_a_check_that_crashes_is_reported_as_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying.py").write_text("import os; os.kill(os.getpid(), 4)")
    (tmp_path / "raising.py").write_text("raise ValueError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (dead,) = child("dying", "torch")
    assert (dead.status, "was killed by SIGILL" in dead.found) == ("fail", True)
    (raised,) = child("raising", "torch")
    assert "exited with code 1: ValueError: broken" in raised.found


def test_visible_gpus_are_listed_with_the_workers_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus().found == "0 visible (optional)"
    write_nvidia_smi(tmp_path, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    entry = RunningGateway("http://a:8000", "http://a:8001", "m", 1, gpus={"w0": ("0", "1")})
    with registered(entry):
        check = gpus()
    assert (check.name, check.status) == ("GPUs", "ok")
    assert check.found == (
        "2 visible: 0 (78 GiB free), 1 (78 GiB free); 2 x NVIDIA H100; "
        "w0 of http://a:8000 on GPU 0, 1"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    assert "lists 0 twice" in gpus().found
