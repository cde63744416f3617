"""Keeps bf16 products from ending a process on CPUs that list more than they allow.

A hypervisor may list AMX and forbid it. oneDNN believes the list, and the first bf16 product ends
the process with SIGILL. So a process of its own tries one, and where that dies oneDNN is held to
less by ONEDNN_MAX_CPU_ISA, which it reads when it is first used.
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
"""What oneDNN is held to where it dies of more, best first."""
CHECKED = "ONEDNN_MAX_CPU_ISA_CHECKED"
"""Set to the value of VARIABLE that was tried: children need not try it again."""
SUSPECTS = frozenset({"amx_tile", "amx_bf16", "avx512_bf16", "avx512_fp16"})
"""Instruction sets for which oneDNN has kernels of its own for bf16; without them it is safe."""
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
    """Makes sure that bf16 products do not end this process or its children.

    Returns what oneDNN is held to, empty where it may use all of the CPU. Where the CPU lists
    instructions that may be forbidden it costs a child process, once for a process and its
    children. Raises EngineFailure where every choice dies, and where it is too late for this
    process: oneDNN was used before, with all that the CPU lists.
    """
    with _lock:
        current = os.environ.get(VARIABLE, ALL)
        if os.environ.get(CHECKED) == current or not _is_suspect():
            return "" if current == ALL else current
        limit = _tried(current)
        if limit is None:
            raise EngineFailure(
                f"bf16 products end the process on this CPU, with {VARIABLE} set to any of "
                f"{', '.join(SAFE)}: use dtype float32"
            )
        os.environ[CHECKED] = limit
        if limit == current:
            return "" if limit == ALL else limit
        log.warning(
            "a bf16 product ends the process with %s=%s: oneDNN is held to %s",
            VARIABLE, current, limit,
        )  # fmt: skip
        os.environ[VARIABLE] = limit
        if not survives():
            raise EngineFailure(
                f"bf16 products end this process, and it is too late to prevent it: start it with "
                f"{VARIABLE}={limit} in its environment, or use dtype float32"
            )
        return limit


def survives() -> bool:
    """Whether a fork of this process survives a bf16 product, as this process then would."""
    with warnings.catch_warnings():
        # Forks of processes with threads may hang in a lock: then the alarm ends them.
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


def _tried(current: str) -> str | None:
    """The first limit under which a fresh process survives, from the current one down."""
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    try:
        trial = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL, *dict.fromkeys((current, *SAFE))],
            env=environ, capture_output=True, text=True, timeout=SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("a bf16 product could not be tried: %s", error)
        return None
    return trial.stdout.strip() or None
