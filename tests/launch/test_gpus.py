"""The GPUs that are visible, by nvidia-smi and CUDA_VISIBLE_DEVICES, and those of --gpus."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.launch.gpus import Gpu, select_gpus, visible_gpus
from lockstep.tokens.errors import BadRequest
from tests.launch.machines import write_nvidia_smi

MIG = ("MIG-11111111-aaaa", "MIG-22222222-bbbb")


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with four H100 and an A100 in two MIG devices."""
    write_nvidia_smi(tmp_path, 4, mig=MIG)
    return {"PATH": f"{tmp_path}{os.pathsep}/usr/bin"}


def ids(gpus: tuple[Gpu, ...] | None) -> list[str]:
    assert gpus is not None
    return [gpu.id for gpu in gpus]


def test_all_gpus_are_visible_by_default_and_mig_devices_in_place_of_their_gpu(
    machine: dict[str, str],
) -> None:
    gpus = visible_gpus(machine)
    assert ids(gpus) == ["0", "1", "2", "3", *MIG]
    assert gpus is not None
    assert (gpus[0].name, gpus[0].free_mib, gpus[0].total_mib) == ("NVIDIA H100", 80_000, 81_559)
    assert gpus[4].is_mig
    assert gpus[4].free_mib is None


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("3,1", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,9,1", ["0"]),  # CUDA ignores what follows a device that does not exist
        ("GPU-00000002,0", ["GPU-00000002", "0"]),
        ("GPU-ffff", []),
        (MIG[1], [MIG[1]]),
        ("MIG-GPU-00000004-aaaa/1/0", ["MIG-GPU-00000004-aaaa/1/0"]),
    ],
)
def test_cuda_visible_devices_limits_them_as_cuda_does(
    machine: dict[str, str], value: str, visible: list[str]
) -> None:
    assert ids(visible_gpus({**machine, "CUDA_VISIBLE_DEVICES": value})) == visible


def test_an_abbreviated_uuid_has_the_memory_of_its_gpu(machine: dict[str, str]) -> None:
    gpus = visible_gpus({**machine, "CUDA_VISIBLE_DEVICES": "GPU-00000002"})
    assert gpus is not None
    assert gpus[0].free_mib == 80_000


def test_a_variable_that_lists_a_gpu_twice_is_rejected(machine: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match="lists 1 twice: list each GPU once"):
        visible_gpus({**machine, "CUDA_VISIBLE_DEVICES": "1,1"})


def test_memory_is_unknown_where_cuda_counts_in_another_order(tmp_path: Path) -> None:
    write_nvidia_smi(tmp_path, 2, names=["NVIDIA A10", "NVIDIA H100"])
    mixed = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "1"}
    by_bus = {**mixed, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_gpus(mixed) == (Gpu("1"),)
    assert [gpu.free_mib for gpu in visible_gpus(by_bus) or ()] == [80_000]


def test_without_nvidia_smi_the_variable_is_believed(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path)}
    assert ids(visible_gpus({**environ, "CUDA_VISIBLE_DEVICES": "0,7"})) == ["0", "7"]


def test_a_selection_counts_among_the_visible_gpus_and_may_repeat_them() -> None:
    visible = [Gpu("4"), Gpu("GPU-b", "GPU-bbbb"), Gpu("MIG-c", "MIG-c")]
    assert ids(select_gpus("all", visible)) == ["4", "GPU-b", "MIG-c"]
    assert ids(select_gpus("1-2,0", visible)) == ["GPU-b", "MIG-c", "4"]
    assert ids(select_gpus("0,0", visible)) == ["4", "4"]
    assert ids(select_gpus("MIG-c,GPU-bb", visible)) == ["MIG-c", "GPU-b"]
    assert ids(select_gpus("0-1,6", None)) == ["0", "1", "6"]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("3", r"--gpus names GPU 3, but 2 are visible \(0, 1\)"),
        ("GPU-x", r"--gpus names GPU-x, but 2 are visible"),
        ("1-0", "expected all, none, or a list such as 0-3,6"),
        ("", "expected all, none, or a list"),
        ("two", "expected all, none, or a list"),
    ],
)
def test_a_selection_that_cannot_be_is_one_line(selection: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        select_gpus(selection, [Gpu("0"), Gpu("1")])
    with pytest.raises(BadRequest, match="name them, as in --gpus 0-7"):
        select_gpus("all", None)
