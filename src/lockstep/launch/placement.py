"""Placement of workers on GPUs: each worker gets a GPU, or a group of GPUs, of its own."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.launch.gpus import (
    BUS_ORDER,
    ORDER,
    VISIBLE,
    Gpu,
    describe_count,
    select_gpus,
    visible_gpus,
)
from lockstep.tokens.errors import BadRequest

SIZES = {
    "--tensor-parallel-size": "-tp",
    "--pipeline-parallel-size": "-pp",
    "--prefill-context-parallel-size": "-pcp",
    "--data-parallel-size": "-dp",
    "--data-parallel-size-local": "-dpl",
    "--nnodes": "-n",
}
"""vLLM's options that decide the number of its GPUs, with their short forms."""
UTILIZATION = 0.92
"""vLLM's default for --gpu-memory-utilization."""
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
MIB = 1 << 20
KV_CACHE_MIB, PREFIX_CACHE_MIB = 2048, 256
"""Defaults of `lockstep worker`."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory that a worker takes on each of its GPUs: `mib`, or a `fraction` of the whole GPU.

    `option` is the worker's option that lowers it.
    """

    option: str
    reason: str
    mib: int = 0
    fraction: float = 0.0

    def on(self, gpu: Gpu) -> int:
        """Return the MiB that a worker takes on this GPU."""
        return self.mib + round(self.fraction * (gpu.total_mib or 0))


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of each worker, in the order of the workers.

    place(4, 2, "all").environ(1)      # {"CUDA_VISIBLE_DEVICES": "2,3", ...}
    """

    groups: tuple[tuple[Gpu, ...], ...]
    order: str | None = None

    def ids(self, worker: int) -> tuple[str, ...]:
        """Return the entries of CUDA_VISIBLE_DEVICES of a worker."""
        return tuple(gpu.id for gpu in self.groups[worker])

    def environ(self, worker: int) -> dict[str, str]:
        """Return the variables that show a worker its own GPUs only."""
        order = {} if self.order is None else {ORDER: self.order}
        return {VISIBLE: ",".join(self.ids(worker)), **order}

    def check_memory(self, need: MemoryNeed) -> None:
        """Raise BadRequest for a GPU with less free memory than its workers take, where nvidia-smi
        reports it."""
        workers = Counter(gpu for group in self.groups for gpu in group)
        for gpu, count in workers.items():
            wanted = count * need.on(gpu)
            if gpu.free_mib is not None and wanted > gpu.free_mib:
                share = f"{count} workers on it need" if count > 1 else "its worker needs"
                raise BadRequest(
                    f"GPU {gpu.id} has {gpu.free_mib:,} MiB free, but {share} {wanted:,} MiB "
                    f"({need.reason}): end the processes that nvidia-smi lists there, lower "
                    f"{need.option}, or choose other GPUs with --gpus",
                    param="gpus",
                )


def place(
    workers: int, size: int, selection: str | None, environ: Mapping[str, str] = os.environ
) -> Placement | None:
    """Return `size` GPUs for each worker, consecutive ones, out of the `selection` of `--gpus`.

    By default all visible GPUs. Return None where nothing lists those, and with `none`: workers
    then see what this process sees. Raises BadRequest for too few GPUs.
    """
    if selection == "none":
        return None
    visible = visible_gpus(environ)
    if selection is None and visible is None:
        return None
    gpus = select_gpus(selection or "all", visible)
    needed = workers * size
    if len(gpus) < needed:
        raise BadRequest(_too_few(workers, size, gpus, selection), param="gpus")
    groups = tuple(gpus[at : at + size] for at in range(0, needed, size))
    for group in groups:
        if len(set(group)) < size or (size > 1 and any(gpu.is_mig for gpu in group)):
            ids = ",".join(gpu.id for gpu in group)
            raise BadRequest(
                f"a worker would get the GPUs {ids}, but needs {size} different whole GPUs (a MIG "
                "device cannot be part of a group): change --gpus, or start workers of one GPU "
                "each",
                param="gpus",
            )
    # nvidia-smi counts by bus, CUDA by default from the fastest GPU. The indices of a
    # CUDA_VISIBLE_DEVICES that was set before are in CUDA's order already.
    by_bus = visible is not None and VISIBLE not in environ
    return Placement(groups, BUS_ORDER if by_bus else None)


def _too_few(workers: int, size: int, gpus: Sequence[Gpu], selection: str | None) -> str:
    group = "1 GPU" if size == 1 else f"{size} GPUs"
    count = "1 worker" if workers == 1 else f"{workers} workers"
    every = selection in (None, "all")
    have = describe_count(gpus) if every else f"--gpus lists {len(gpus)}"
    fewer = len(gpus) // size
    if fewer:
        positions = [str(at % (fewer * size)) for at in range(workers * size)]
        example = f" such as --gpus {','.join(positions)}" if every else ""
        way_out = f"give --workers {fewer}, or share GPUs by listing them twice{example}"
    elif gpus:
        way_out = "give a smaller parallel size"
    else:
        way_out = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or run on the CPU"
    needs = "needs" if workers == 1 else "need"
    return f"{count} with {group} each {needs} {workers * size}, but {have}: {way_out}"


def vllm_group_size(arguments: Sequence[str]) -> int:
    """Return the number of local GPUs that a vLLM server with these options uses; 0 where Ray
    places its processes. Raises BadRequest for a size that is no positive integer."""
    options = _config_file(arguments)
    for name, short in SIZES.items():
        if (value := option(arguments, name, short)) is not None:
            options[name] = value
    if _executor(arguments, options) == "ray":
        return 0
    size = {name: _positive(name, options.get(name, 1)) for name in SIZES}
    local = "--data-parallel-size" + ("-local" if "--data-parallel-size-local" in options else "")
    model = (
        size["--tensor-parallel-size"]
        * size["--pipeline-parallel-size"]
        * size["--prefill-context-parallel-size"]
    )
    return max(1, model * size[local] // size["--nnodes"])


def vllm_memory(arguments: Sequence[str]) -> MemoryNeed:
    """Return what vLLM demands to be free at its start."""
    value = option(arguments, "--gpu-memory-utilization") or UTILIZATION
    try:
        fraction = float(value)
    except ValueError:
        fraction = UTILIZATION  # vLLM rejects it with its own message
    name = "--gpu-memory-utilization"
    return MemoryNeed(name, f"{name} {fraction:g}", fraction=fraction)


def embedded_memory(model: Path, arguments: Sequence[str]) -> MemoryNeed:
    """Return the memory of a `lockstep worker`: weights in its dtype, and its KV caches."""
    dtype = option(arguments, "--dtype") or "float32"
    weights = _parameters(model) * BYTES.get(dtype, 4) // MIB
    running = _mebibytes(arguments, "--kv-cache-mb", KV_CACHE_MIB)
    prefixes = _mebibytes(arguments, "--prefix-cache-mb", PREFIX_CACHE_MIB)
    return MemoryNeed(
        "--kv-cache-mb",
        f"weights {weights:,}, KV cache {running:,}, prefix cache {prefixes:,}",
        mib=weights + running + prefixes,
    )


def embedded_gpus(arguments: Sequence[str], selection: str | None) -> int:
    """Return how many GPUs a `lockstep worker` with these options uses: 0 or 1.

    A device such as cuda:1 was placed by hand: 0. Raises BadRequest for `selection` with a worker
    that uses no GPU, or with such a device.
    """
    device = option(arguments, "--device") or "cpu"
    if device == "cuda":
        return 1
    if selection not in (None, "none"):
        raise BadRequest(
            f"--gpus {selection} is for workers on GPUs, but the device of these is {device}: give "
            '--worker-args "--device cuda"',
            param="gpus",
        )
    return 0


def option(arguments: Sequence[str], *names: str) -> str | None:
    """Return the last value of an option, written `--x N` or `--x=N`; vLLM takes _ for - too."""
    value = None
    for at, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in names:
            following = arguments[at + 1] if at + 1 < len(arguments) else ""
            value = inline if equals else following
    return value


def _config_file(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options in the file of vLLM's --config, which come before those of the command."""
    if (path := option(arguments, "--config")) is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadRequest(f"--config {path} cannot be read: {error}", param="config") from None
    rows = content.items() if isinstance(content, dict) else ()
    return {"--" + str(name).replace("_", "-"): value for name, value in rows}


def _executor(arguments: Sequence[str], options: Mapping[str, Any]) -> object:
    name = "--distributed-executor-backend"
    return option(arguments, name) or options.get(name)


def _positive(name: str, value: object) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise BadRequest(f"{name} is {value!r}: expected 1 or more", param=name.lstrip("-"))
    return number


def _mebibytes(arguments: Sequence[str], name: str, default: int) -> int:
    value = option(arguments, name)
    return int(value) if value is not None and value.isdigit() else default


def _parameters(model: Path) -> int:
    """Return the number of parameters in the safetensors files of a model, about."""
    nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        config = {}
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    return nbytes // BYTES.get(str(stored), 4)
