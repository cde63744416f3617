"""All checks of this machine. Those that compute run in a child process, which may crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from lockstep.doctor import engines, host
from lockstep.doctor.check import Check
from lockstep.doctor.gpus import gpus
from lockstep.settings import Settings

CHILD_SECONDS = 180.0
TORCH = "pip install 'lockstep-rl[train]'"


def examine() -> Iterator[Check]:
    """Yield each check as soon as it is done. The slow ones take some seconds."""
    yield host.versions()
    yield host.cpu()
    yield gpus()
    yield from _computing()
    for number, option in host.PORTS.items():
        yield host.port(number, option)
    yield host.run_directory()
    yield host.state_directory()
    settings = Settings.read()
    yield from engines.optional_engines(
        {"vllm": settings.vllm_python, "sglang": settings.sglang_python}
    )


def _computing() -> Iterator[Check]:
    """Yield the checks that need torch, from a child process.

    An instruction that the CPU lists and the hypervisor forbids kills the process that uses it.
    """
    missing = [name for name in ("torch", "safetensors") if find_spec(name) is None]
    if missing:
        finding = f"{' and '.join(missing)} not installed: no embedded engine, training or demo"
        yield Check("torch", "fail", finding, TORCH)
        return
    yield from child("lockstep.doctor.compute", "torch")


def child(module: str, name: str) -> list[Check]:
    """Return the checks that a module prints as JSON, or one failed check if it crashes."""
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", module], capture_output=True, text=True,
            timeout=CHILD_SECONDS, env=os.environ, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        finding = f"{module} did not end within {CHILD_SECONDS:g} s"
        return [Check(name, "fail", finding, "retry on an idle machine")]
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [""])[-1]
        how = (
            f"was killed by {signal.Signals(-process.returncode).name}"
            if process.returncode < 0
            else f"exited with code {process.returncode}"
        )
        return [Check(name, "fail", f"{module} {how}: {last}", f"run python -m {module}")]
    return [Check(**row) for row in json.loads(process.stdout)]
