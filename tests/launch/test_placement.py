"""Each worker gets its own GPUs, before and after a restart, and is refused what is not there."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch import vllm
from lockstep.launch.gpus import Gpu
from lockstep.launch.placement import (
    MemoryNeed,
    Placement,
    embedded_gpus,
    embedded_memory,
    place,
    vllm_group_size,
    vllm_memory,
)
from lockstep.launch.supervisor import Supervisor
from lockstep.launch.workers import embedded_workers
from lockstep.tokens.errors import BadRequest
from tests.fleet.fakes import until
from tests.launch.machines import write_nvidia_smi, write_recorder
from tests.processes import TOKEN


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nvidia_smi(tmp_path, 8)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def groups(placement: Placement | None) -> list[str]:
    assert placement is not None
    return [",".join(placement.ids(at)) for at in range(len(placement.groups))]


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("workers", "size", "selection", "expected"),
    [
        (8, 1, None, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (4, 2, None, ["0,1", "2,3", "4,5", "6,7"]),
        (2, 2, "0-2,6", ["0,1", "2,6"]),
        (1, 1, "all", ["0"]),
        (3, 1, "5,5,5", ["5", "5", "5"]),
        (2, 2, "0,1,0,1", ["0,1", "0,1"]),
    ],
)
def test_workers_get_consecutive_gpus_and_share_them_only_where_listed_twice(
    workers: int, size: int, selection: str | None, expected: list[str]
) -> None:
    assert groups(place(workers, size, selection)) == expected


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("workers", "size", "selection", "message"),
    [
        (16, 1, None, r"16 workers with 1 GPU each need 16, but 8 are visible \(0, 1, 2, .*\): "
         r"give --workers 8, or share GPUs by listing them twice such as --gpus 0,1,.*,7,0,.*7$"),
        (5, 2, None, r"5 workers with 2 GPUs each need 10, but 8 are visible .*--workers 4, or"),
        (1, 16, None, r"1 worker with 16 GPUs each needs 16, but 8 .*: give a smaller parallel"),
        (4, 1, "0-2", r"need 4, but --gpus lists 3: give --workers 3, or share"),
        (1, 2, "0,0", r"GPUs 0,0, but needs 2 different whole GPUs"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_one_line_that_names_the_counts_and_the_way_out(
    workers: int, size: int, selection: str | None, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        place(workers, size, selection)
    assert "\n" not in str(error.value)


def test_mig_devices_are_given_one_by_one_and_never_as_a_group(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, mig=("MIG-a", "MIG-b"))
    machine = {"PATH": str(tmp_path)}
    assert groups(place(2, 1, None, machine)) == ["MIG-a", "MIG-b"]
    with pytest.raises(BadRequest, match="MIG device cannot be part of a group"):
        place(1, 2, None, machine)


@pytest.mark.usefixtures("eight")
def test_a_variable_that_is_set_already_is_divided_in_its_own_order() -> None:
    placement = place(2, 1, None, {**os.environ, "CUDA_VISIBLE_DEVICES": "6,GPU-00000003"})
    assert placement is not None
    assert placement.environ(0) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert placement.environ(1) == {"CUDA_VISIBLE_DEVICES": "GPU-00000003"}
    default = place(2, 1, None)
    assert default is not None
    assert default.environ(1) == {
        "CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # nvidia-smi's order, which the indices are in
    }


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ([], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["--tensor-parallel-size=4"], 4),
        (["--tensor_parallel_size", "4"], 4),
        (["-tp", "2", "-pp", "2", "-dp", "2"], 8),
        (["-tp=2", "--pipeline-parallel-size=3"], 6),
        (["-dp", "8", "--data-parallel-size-local", "2", "-tp", "2"], 4),
        (["-pcp", "2"], 2),
        (["-tp", "8", "--nnodes", "2"], 4),
        (["-tp", "2", "-tp", "4"], 4),
        (["-tp", "16", "--distributed-executor-backend", "ray"], 0),
    ],
)
def test_a_vllm_server_gets_the_gpus_that_its_options_need(arguments: list[str], size: int) -> None:
    assert vllm_group_size(arguments) == size


def test_sizes_in_a_configuration_file_count_too(tmp_path: Path) -> None:
    config = tmp_path / "vllm.yaml"
    config.write_text("tensor-parallel-size: 4\npipeline_parallel_size: 2\n")
    assert vllm_group_size(["--config", str(config)]) == 8
    assert vllm_group_size(["--config", str(config), "-tp", "1"]) == 2
    with pytest.raises(BadRequest, match="cannot be read"):
        vllm_group_size(["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(BadRequest, match="tensor-parallel-size is 'two': expected 1 or more"):
        vllm_group_size(["-tp", "two"])


def test_workers_on_the_cpu_or_on_a_device_of_their_own_are_not_placed() -> None:
    assert embedded_gpus((), None) == embedded_gpus(("--device", "cuda:1"), None) == 0
    assert embedded_gpus(("--device=cuda",), None) == 1
    with pytest.raises(BadRequest, match="the device of these is cpu"):
        embedded_gpus((), "0-3")


def test_a_gpu_without_the_memory_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    busy = Gpu("3", free_mib=20_000, total_mib=80_000)
    with pytest.raises(BadRequest, match=r"GPU 3 has 20,000 MiB free, but its worker needs 73,600 "
                       r"MiB \(--gpu-memory-utilization 0.92\)"):  # fmt: skip
        Placement(((busy,),)).check_memory(vllm_memory(()))
    Placement(((busy,),)).check_memory(vllm_memory(("--gpu-memory-utilization", "0.2")))
    shared = vllm_memory(("--gpu-memory-utilization=0.2",))
    with pytest.raises(BadRequest, match="2 workers on it need 32,000 MiB"):
        Placement(((busy,), (busy,))).check_memory(shared)
    Placement(((Gpu("0"),),)).check_memory(MemoryNeed("--x", "unknown memory", mib=1 << 40))

    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(4 << 20))
    need = embedded_memory(tmp_path, ("--kv-cache-mb", "100", "--prefix-cache-mb", "0"))
    assert need.mib == 8 + 100  # stored in two bytes, held in four
    assert embedded_memory(tmp_path, ("--dtype", "bfloat16")).mib == 4 + 2048 + 256


def starts(log: Path) -> list[dict[str, Any]]:
    """What the recording interpreter wrote down: one row for each start."""
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines()]


async def check_restart(supervisor: Supervisor, log: Path, expected: list[str]) -> None:
    """Start the workers and kill the second: it comes back on the GPUs it had."""
    async with supervisor:
        await supervisor.ready()
        ports = [child.url.rpartition(":")[2] for child in supervisor.children]
        gpus = {
            arguments[arguments.index("--port") + 1]: environ["CUDA_VISIBLE_DEVICES"]
            for arguments, environ in starts(log)
        }
        assert [gpus[port] for port in ports] == expected
        second = supervisor.children[1]
        assert second.pid is not None
        os.kill(second.pid, signal.SIGKILL)
        await until(lambda: second.restarts == 1 and second.state == "running", 60)
        arguments, environ = starts(log)[-1]
        assert arguments[arguments.index("--port") + 1] == ports[1]
        assert environ["CUDA_VISIBLE_DEVICES"] == expected[1]


@pytest.mark.usefixtures("eight")
async def test_embedded_workers_see_one_gpu_each_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, log = write_recorder(tmp_path / "environment")
    placement = place(3, 1, "2-4")
    monkeypatch.setattr(sys, "executable", str(python))
    workers = embedded_workers("tiny", 3, admin_token=TOKEN, placement=placement)
    await check_restart(workers, log, ["2", "3", "4"])


@pytest.mark.usefixtures("eight")
async def test_vllm_servers_see_a_group_each_also_after_a_restart(tmp_path: Path) -> None:
    python, log = write_recorder(tmp_path / "environment")
    arguments = ("--tensor-parallel-size", "2")
    placement = place(2, vllm_group_size(arguments), None)
    servers = vllm.servers("tiny", 2, python=python, arguments=arguments, placement=placement)
    await check_restart(servers, log, ["0,1", "2,3"])


async def test_workers_without_a_placement_see_what_this_process_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, log = write_recorder(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setattr(sys, "executable", str(python))
    async with embedded_workers("tiny", 1, admin_token=TOKEN) as workers:
        await workers.ready()
    assert [environ["CUDA_VISIBLE_DEVICES"] for _, environ in starts(log)] == ["5,6"]
