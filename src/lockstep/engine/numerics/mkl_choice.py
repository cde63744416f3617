"""Choice of the MKL mode that keeps the bits of a row on CPUs without MKL's guarantee.

On Intel CPUs MKL guarantees strict mode. On other CPUs the default mode held wherever it was
measured, and strict mode may be missing or slow. Both are therefore tested once, in child
processes, and the result is cached per user and machine.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import torch

from lockstep.engine.numerics import mkl

log = logging.getLogger(__name__)
DEFAULT = "OFF"
MODES = (DEFAULT, mkl.STRICT)
"""Modes tested on CPUs of other vendors, best first. The default is never slower."""
SECONDS = 120.0
FEW_ROWS = 8
"""Largest row multiple that is fast for small batches."""
ADVICE = ("MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ATEN_CPU_CAPABILITY")
"""Environment variables that change MKL's results. A cached mode holds only for their values."""
_TRIAL = """
import sys
from lockstep.engine.numerics import mkl
from lockstep.engine.numerics.block_shapes import attention_shapes, products, row_multiple
mode = sys.argv[1]
held = mode == "OFF" or mkl.set_mode(mode)
sizes = ((128, 384), (256, 1000), (896, 2048))
rows = [row_multiple(products(hidden=h, q_size=h, kv_size=h // 2, vocab=2 * h, intermediate=i))
        for h, i in sizes]
good = held and all(rows) and all(attention_shapes(dim).tails for dim in (32, 64, 128))
print(max(rows) if good else 0)
"""


@lru_cache
def preferred_mode() -> str | None:
    """Return the mode to put MKL into, or None to keep its default."""
    if mkl.mode() == mkl.ABSENT:
        return None
    if vendor() == "GenuineIntel":
        return mkl.STRICT if mkl.offers_strict() else None
    mode = _cached_mode()
    return None if mode == DEFAULT else mode


def find_mode() -> str:
    """Return the best mode that keeps the bits in a trial, or the default if none does."""
    multiples = {mode: _try_mode(mode) for mode in MODES}
    # Prefer a mode that is fast for small batches; otherwise accept any mode that holds.
    for most in (FEW_ROWS, sys.maxsize):
        for mode, rows in multiples.items():
            if 0 < rows <= most:
                return mode
    return DEFAULT


def _try_mode(mode: str) -> int:
    """Return the row multiple that a process in this mode finds, or 0 if there is none."""
    environ = {name: value for name, value in os.environ.items() if name != mkl.VARIABLE}
    try:
        trial = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL, mode],
            env=environ, capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
        return int(trial.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("trial of MKL mode %s failed: %s", mode, error)
        return 0


def _cached_mode() -> str:
    """Return the mode for this machine, from the cache file if it holds one."""
    path = _cache_directory() / "mkl-mode.json"
    key = "|".join(
        [_processor(), torch.__version__, *(os.environ.get(name, "") for name in ADVICE)]
    )
    try:
        cached = json.loads(path.read_bytes())
    except (OSError, ValueError):
        cached = {}
    if not isinstance(cached, dict):
        cached = {}
    if cached.get(key) in MODES:
        return str(cached[key])
    cached[key] = find_mode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Rename a complete file into place: other processes may read or write it now.
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(cached, indent=1))
        scratch.replace(path)
    except OSError as error:
        log.info("cannot write the MKL mode to %s: %s", path, error)
    return str(cached[key])


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lockstep"


@lru_cache
def vendor() -> str:
    """Return the CPU vendor (GenuineIntel, AuthenticAMD), or the machine type if it is unknown."""
    return _cpuinfo().get("vendor_id", platform.machine())


def cpu_flags() -> frozenset[str] | None:
    """Return the instruction sets that the CPU lists, or None if the system hides them."""
    flags = _cpuinfo().get("flags")
    return None if flags is None else frozenset(flags.split())


def _processor() -> str:
    return f"{vendor()} {_cpuinfo().get('model name', platform.processor())}"


@lru_cache
def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
