"""Check of the GPUs that workers can be placed on, and of those that running workers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lockstep.doctor.check import Check
from lockstep.launch.gpus import VISIBLE, Gpu, visible_gpus
from lockstep.running_gateways import running_gateways
from lockstep.tokens.errors import BadRequest


def gpus() -> Check:
    """Report the visible GPUs, and the workers of running gateways on them."""
    try:
        visible = visible_gpus()
    except BadRequest as error:
        return Check("GPUs", "note", error.message, f"correct {VISIBLE}")
    if not visible:
        finding = "no nvidia-smi, no device file" if visible is None else "0 visible"
        return Check("GPUs", "note", f"{finding} (optional)", "workers run on the CPU")
    placed = [
        f"{worker} of {gateway.url} on GPU {', '.join(ids)}"
        for gateway in running_gateways()
        for worker, ids in gateway.gpus.items()
    ]
    finding = "; ".join([f"{len(visible)} visible: {describe(visible)}", *placed])
    return Check("GPUs", "ok", finding, "lockstep serve --workers N --gpus LIST places workers")


def describe(gpus: Sequence[Gpu]) -> str:
    """Return each GPU with its free memory, and how many there are of each name."""
    names = Counter(gpu.name for gpu in gpus if gpu.name)
    kinds = ", ".join(f"{count} x {name}" for name, count in names.items())
    rows = [
        gpu.id if gpu.free_mib is None else f"{gpu.id} ({gpu.free_mib / 1024:.0f} GiB free)"
        for gpu in gpus
    ]
    return ", ".join(rows) + (f"; {kinds}" if kinds else "")
