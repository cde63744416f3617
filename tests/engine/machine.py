"""The self-test of this machine in a fresh process, and child processes that act as another CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

DECIDING = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
            "ONEDNN_MAX_CPU_ISA_CHECKED")  # fmt: skip
FORCED = {
    "as it is": {},
    "MKL as on AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "MKL as on SSE4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "torch without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "oneDNN as on AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "MKL in the mode for all makes": {"MKL_CBWR": "COMPATIBLE"},
    "MKL in its default mode": {"MKL_CBWR": "OFF"},
}
"""Kinds of x86 CPU that this one can play, by the variables that make it do so."""
SELF_TEST = """
import json, sys
from lockstep.engine.numerics import selftest
from lockstep.engine.options import EngineOptions
report = selftest.run(sys.argv[1], EngineOptions(max_seqs=4, arithmetic=sys.argv[2]))
print(json.dumps({"exact": report.exact, "problem": report.problem, **report.plan.to_json(),
                  "checks": [check.name for check in report.checks]}))
"""


def child(code: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh process in which only `environ` decides how it computes."""
    kept = {name: value for name, value in os.environ.items() if name not in DECIDING}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**kept, **environ}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


@cache
def self_test(model: str = "tiny", arithmetic: str = "auto", **environ: str) -> dict[str, Any]:
    """Return the report of the self-test in a fresh process with that environment."""
    process = child(SELF_TEST, model, arithmetic, **environ)
    assert process.returncode == 0, process.stderr
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return report
