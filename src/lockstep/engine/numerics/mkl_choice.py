"""Finds the mode of MKL that keeps the bits of a row on CPUs for which MKL promises none.

On Intel CPUs strict mode is MKL's own promise. On others the default mode has held where it was
measured, and strict mode may be missing or slow: so both are tried once, in processes of their own,
and the result is kept for this user and machine.
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
"""The modes that are tried on a CPU of another make, best first: the default is never slower."""
SECONDS = 120.0
FEW_ROWS = 8
"""A mode that holds only for larger multiples than this makes small batches slow."""
ADVICE = ("MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "ATEN_CPU_CAPABILITY")
"""Variables that change what MKL does: a result holds for their values only."""
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
    """The mode to put MKL into, or None for the mode it has by itself."""
    if mkl.mode() == mkl.ABSENT:
        return None
    if vendor() == "GenuineIntel":
        return mkl.STRICT if mkl.offers_strict() else None
    chosen = _remembered()
    return None if chosen == DEFAULT else chosen


def tried_mode() -> str:
    """The best mode of those that keep the bits when tried; the default where none does."""
    multiples = {mode: _tried(mode) for mode in MODES}
    # First any mode that is good for small batches, only then any mode at all.
    for most in (FEW_ROWS, sys.maxsize):
        for mode, rows in multiples.items():
            if 0 < rows <= most:
                return mode
    return DEFAULT


def _tried(mode: str) -> int:
    """The row multiple that a process in this mode finds; 0 where there is none."""
    environ = {name: value for name, value in os.environ.items() if name != mkl.VARIABLE}
    try:
        trial = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL, mode],
            env=environ, capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
        return int(trial.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("MKL's mode %s could not be tried: %s", mode, error)
        return 0


def _remembered() -> str:
    """`tried_mode` of this machine, from the file of earlier results where it is there."""
    path = _cache_directory() / "mkl-mode.json"
    key = "|".join(
        [_processor(), torch.__version__, *(os.environ.get(name, "") for name in ADVICE)]
    )
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict):
        known = {}
    if known.get(key) in MODES:
        return str(known[key])
    known[key] = tried_mode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(known, indent=1))
        scratch.replace(path)
    except OSError as error:
        log.info("the mode of MKL cannot be kept in %s: %s", path, error)
    return str(known[key])


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lockstep"


@lru_cache
def vendor() -> str:
    """The make of the CPU as it names itself, GenuineIntel or AuthenticAMD; else its machine."""
    return _cpuinfo().get("vendor_id", platform.machine())


def cpu_flags() -> frozenset[str] | None:
    """The instruction sets that the CPU lists; None where the system does not say."""
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
