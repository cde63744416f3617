"""How torch computes here: run as a program, it prints its checks as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch

from lockstep.doctor.check import Check
from lockstep.doctor.host import cores
from lockstep.engine import Engine


def checks() -> Iterator[Check]:
    yield Check("torch", "ok", f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    yield threads()
    yield exact()
    yield cuda()


def threads() -> Check:
    """A worker takes one thread unless told otherwise; torch itself takes what it finds."""
    count = torch.get_num_threads()
    if count > cores():
        found = f"torch takes {count}, but this process may use {cores()} cores"
        return Check("threads", "note", found, f"export OMP_NUM_THREADS={cores()}")
    return Check("threads", "ok", f"torch takes {count} of {cores()} cores, a worker 1")


def exact() -> Check:
    """Whether logprobs of engine and trainer can be equal bit for bit."""
    engine = Engine("tiny")
    stats = engine.stats()
    if stats["arithmetic"] == "close":
        why = f"not possible here: {stats['arithmetic_note']}"
        return Check("exact", "note", why, "everything runs in close mode")
    return Check("exact", "ok", "engine and trainer agree bit for bit (fp32)")


def cuda() -> Check:
    if not torch.cuda.is_available():
        why = "this torch has no CUDA" if torch.version.cuda is None else "no GPU is visible"
        return Check("CUDA", "note", f"{why} (optional)", "install torch for CUDA on a GPU machine")
    names = {torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())}
    found = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}"
    return Check("CUDA", "ok", found)


if __name__ == "__main__":
    sys.stdout.write(json.dumps([check.to_json() for check in checks()]))
