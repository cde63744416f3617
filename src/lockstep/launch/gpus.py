"""The GPUs that this process may use, as nvidia-smi and CUDA_VISIBLE_DEVICES describe them."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.tokens.errors import BadRequest

log = logging.getLogger(__name__)
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BUS_ORDER = "PCI_BUS_ID"
"""The order in which nvidia-smi counts. CUDA's own default counts the fastest GPU first."""
SMI_SECONDS = 20.0
FIELDS = "index,uuid,name,memory.free,memory.total,mig.mode.current"
MIG_LINE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
GPU_LINE = re.compile(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or one MIG device of a GPU.

    `id` is its entry in CUDA_VISIBLE_DEVICES: an index, a UUID or a MIG name. Memory is in MiB, and
    None where nvidia-smi does not report it.
    """

    id: str
    uuid: str = ""
    name: str = ""
    free_mib: int | None = None
    total_mib: int | None = None

    @property
    def is_mig(self) -> bool:
        return self.id.startswith("MIG-")


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...] | None:
    """Return the GPUs that a CUDA program started with `environ` would see, in its order.

    Return None where nothing lists them: CUDA_VISIBLE_DEVICES is not set, and there is neither
    nvidia-smi nor a device file of NVIDIA's driver. Raises BadRequest for a variable that lists a
    GPU twice, with which CUDA sees none.
    """
    installed = _installed(environ)
    if (value := environ.get(VISIBLE)) is None:
        return installed
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    if repeated := sorted({entry for entry in entries if entries.count(entry) > 1}):
        raise BadRequest(
            f"{VISIBLE} is {value!r} and lists {repeated[0]} twice: list each GPU once, and let "
            "workers share a GPU with --gpus",
            param=VISIBLE,
        )
    # The memory of GPU 0 is only known where CUDA and nvidia-smi count alike.
    same_order = environ.get(ORDER) == BUS_ORDER or len({gpu.name for gpu in installed or ()}) < 2
    gpus: list[Gpu] = []
    for entry in entries:
        gpu = _visible(entry, installed)
        if gpu is None:  # CUDA ignores the rest of the list as well
            break
        gpus.append(gpu if same_order or not entry.isdigit() else Gpu(entry))
    return tuple(gpus)


def select_gpus(selection: str, visible: Sequence[Gpu] | None) -> tuple[Gpu, ...]:
    """Return the GPUs of `--gpus`: `all`, or positions among the visible ones such as `0-3,6`, or
    UUIDs and MIG names. A GPU that is listed twice is returned twice, for two workers to share.

    Where the visible ones are unknown (None), positions are taken as indices. Raises BadRequest.
    """
    if selection == "all":
        if visible is None:
            raise BadRequest(
                "--gpus all: this machine has no nvidia-smi to list its GPUs; name them, as in "
                "--gpus 0-7",
                param="gpus",
            )
        return tuple(visible)
    gpus: list[Gpu] = []
    for entry in selection.split(","):
        entry = entry.strip()
        if entry.startswith(("GPU-", "MIG-")):
            gpus.append(_named(entry, visible))
            continue
        match = RANGE.fullmatch(entry)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise BadRequest(
                f"--gpus is {selection!r}: expected all, none, or a list such as 0-3,6",
                param="gpus",
            )
        for position in range(int(match[1]), int(match[2] or match[1]) + 1):
            if visible is None:
                gpus.append(Gpu(str(position)))
            elif position < len(visible):
                gpus.append(visible[position])
            else:
                raise BadRequest(
                    f"--gpus names GPU {position}, but {describe_count(visible)}", param="gpus"
                )
    return tuple(gpus)


def describe_count(gpus: Sequence[Gpu]) -> str:
    """Return how many GPUs are visible, and which, as the end of a sentence."""
    ids = ", ".join(gpu.id for gpu in gpus)
    verb = "is" if len(gpus) == 1 else "are"
    return f"{len(gpus)} {verb} visible" + (f" ({ids})" if ids else "")


def _named(entry: str, visible: Sequence[Gpu] | None) -> Gpu:
    if visible is None:
        return Gpu(entry)
    for gpu in visible:
        if gpu.id == entry or gpu.uuid.startswith(entry):
            return gpu
    raise BadRequest(f"--gpus names {entry}, but {describe_count(visible)}", param="gpus")


def _visible(entry: str, installed: Sequence[Gpu] | None) -> Gpu | None:
    """Return the GPU of one entry of CUDA_VISIBLE_DEVICES, or None for one that does not exist."""
    if entry.isdigit():
        if installed is None:
            return Gpu(entry)
        whole = [gpu for gpu in installed if gpu.id == entry]
        return whole[0] if whole else None
    if not entry.startswith(("GPU-", "MIG-")):  # -1, NoDevFiles: none from here on
        return None
    for gpu in installed or ():
        if gpu.uuid.startswith(entry):
            return replace(gpu, id=entry)
    # nvidia-smi of a container may not list MIG devices, and old names have no UUID.
    return Gpu(entry) if installed is None or entry.startswith("MIG-") else None


def _installed(environ: Mapping[str, str]) -> tuple[Gpu, ...] | None:
    """Return the GPUs of this machine in nvidia-smi's order; the MIG devices of a GPU in its place.
    None where there is neither nvidia-smi nor a device file."""
    table = _smi(environ, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
    if table is None:
        files = sorted(Path("/dev").glob("nvidia[0-9]*"))
        return tuple(Gpu(str(index)) for index in range(len(files))) or None
    gpus: list[Gpu] = []
    slices: dict[str, list[Gpu]] | None = None
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 6:
            continue  # "No devices were found"
        index, uuid, name, free, total, mig = cells
        if mig == "Enabled":
            slices = _mig_devices(environ) if slices is None else slices
            gpus += slices.get(uuid, ())
        else:
            gpus.append(Gpu(index, uuid, name, _mib(free), _mib(total)))
    return tuple(gpus)


def _mig_devices(environ: Mapping[str, str]) -> dict[str, list[Gpu]]:
    """Return the MIG devices by the UUID of their GPU."""
    devices: dict[str, list[Gpu]] = {}
    parent = ""
    for line in (_smi(environ, "-L") or "").splitlines():
        if match := GPU_LINE.match(line):
            parent = match[1]
        elif match := MIG_LINE.match(line):
            devices.setdefault(parent, []).append(Gpu(match[2], match[2], f"MIG {match[1]}"))
    return devices


def _smi(environ: Mapping[str, str], *arguments: str) -> str | None:
    """Return the output of nvidia-smi, or None where it is not installed or fails."""
    try:
        process = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_SECONDS,
            env=dict(environ), check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("nvidia-smi did not list the GPUs: %s", error)
        return None
    if process.returncode:
        reason = (process.stdout + process.stderr).strip()[:200]
        log.warning("nvidia-smi ended with code %d: %s", process.returncode, reason)
        return None
    return process.stdout


def _mib(cell: str) -> int | None:
    """Return the number, or None for [N/A]: GPUs that share the memory of the CPU."""
    return int(cell) if cell.isdigit() else None
