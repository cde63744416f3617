"""Checks of the optional engines: which are installed, and in which environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lockstep.doctor.check import Check

SECONDS = 30.0
VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


def vllm(python: str | None = None) -> Check:
    """Check for vLLM (`lockstep serve --engine vllm`). `python` is LOCKSTEP_VLLM_PYTHON."""
    return _in_environment(
        "vLLM", "vllm", Path(python or ".venv-vllm/bin/python"),
        "scripts/install-vllm.sh, or set LOCKSTEP_VLLM_PYTHON",
    )  # fmt: skip


def dynamo() -> Check:
    """Check for NVIDIA Dynamo (`lockstep dynamo`)."""
    return _in_environment(
        "Dynamo", "ai-dynamo", Path(".venv-dynamo/bin/python"), "scripts/install-dynamo.sh"
    )


def sglang() -> Check:
    """Check for SGLang (`lockstep gateway --worker URL`)."""
    return _in_environment(
        "SGLang", "sglang", Path(".venv-sglang/bin/python"),
        "start an SGLang server anywhere, then lockstep gateway --worker URL",
    )  # fmt: skip


def _in_environment(name: str, package: str, python: Path, way_out: str) -> Check:
    """Look for the package in the environment of `python`, then in this one, without importing."""
    if shutil.which(python) is not None:
        version_query = subprocess.run(
            [python, "-c", VERSION, package], capture_output=True, text=True, timeout=SECONDS,
            check=False,
        )  # fmt: skip
        if version_query.returncode == 0:
            return Check(name, "ok", f"{version_query.stdout.strip()} in {python.parent.parent}")
    try:
        return Check(name, "ok", f"{version(package)} in {sys.prefix}")
    except PackageNotFoundError:
        return Check(name, "note", "not found (optional)", way_out)
