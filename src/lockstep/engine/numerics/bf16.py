"""Protection against CPUs whose listed bf16 instructions crash the process.

A hypervisor may list AMX and forbid its use. oneDNN trusts the list, and the first bf16 product
kills the process with SIGILL. A child process therefore tries one. If it dies, oneDNN is limited by
ONEDNN_MAX_CPU_ISA, which it reads on first use.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import warnings

import torch

from lockstep.engine.numerics.mkl_choice import cpu_flags
from lockstep.tokens.errors import EngineFailure

log = logging.getLogger(__name__)
VARIABLE = "ONEDNN_MAX_CPU_ISA"
ALL = "ALL"
SAFE = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
"""Limits to try for oneDNN, best first."""
CHECKED = "ONEDNN_MAX_CPU_ISA_CHECKED"
"""Set to the tested value of VARIABLE, so that child processes do not repeat the trial."""
SUSPECTS = frozenset({"amx_tile", "amx_bf16", "avx512_bf16", "avx512_fp16"})
"""Instruction sets for which oneDNN has bf16 kernels. A CPU without them needs no trial."""
SECONDS = 120.0
FORK_SECONDS = 20
_TRIAL = """
import os, sys
from lockstep.engine.numerics.bf16 import survives
for limit in sys.argv[1:]:
    os.environ["ONEDNN_MAX_CPU_ISA"] = limit
    if survives():
        print(limit)
        break
"""
_lock = threading.Lock()


def make_bf16_safe() -> str:
    """Make sure that bf16 products do not kill this process or its children.

    Returns the limit set for oneDNN, or an empty string when it may use the whole CPU. On a CPU
    that lists suspect instructions this runs a child process, once for a process and its children.
    Raises EngineFailure when every limit crashes, or when this process has already used oneDNN
    without one.
    """
    with _lock:
        current = os.environ.get(VARIABLE, ALL)
        if os.environ.get(CHECKED) == current or not _is_suspect():
            return "" if current == ALL else current
        limit = _find_limit(current)
        if limit is None:
            raise EngineFailure(
                f"bf16 products crash the process on this CPU, with {VARIABLE} set to any of "
                f"{', '.join(SAFE)}: use dtype float32"
            )
        os.environ[CHECKED] = limit
        if limit == current:
            return "" if limit == ALL else limit
        log.warning(
            "a bf16 product crashes with %s=%s: limiting oneDNN to %s",
            VARIABLE, current, limit,
        )  # fmt: skip
        # oneDNN reads the variable on first use: if this process has used it, it is too late.
        os.environ[VARIABLE] = limit
        if not survives():
            raise EngineFailure(
                f"bf16 products crash this process, and oneDNN is already initialized: set "
                f"{VARIABLE}={limit} in its environment and restart it, or use dtype float32"
            )
        return limit


def survives() -> bool:
    """Return whether a fork of this process survives a bf16 product, as this process would."""
    with warnings.catch_warnings():
        # A fork of a process with threads may hang in a lock; the alarm then ends it.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(FORK_SECONDS)
        try:
            torch.set_num_threads(1)
            x = torch.ones(64, 64, dtype=torch.bfloat16)
            os._exit(0 if float(torch.nn.functional.linear(x, x)[0, 0]) == 64 else 1)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _is_suspect() -> bool:
    flags = cpu_flags()
    return flags is None or bool(flags & SUSPECTS)


def _find_limit(current: str) -> str | None:
    """Return the first limit, from the current one down, with which a new process survives."""
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    try:
        trial = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL, *dict.fromkeys((current, *SAFE))],
            env=environ, capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("trial of a bf16 product failed: %s", error)
        return None
    return trial.stdout.strip() or None
