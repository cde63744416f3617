"""Checks of the optional engines: which are installed, and in which environment."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from lockstep.backends.registry import ENGINES
from lockstep.doctor.check import Check

SECONDS = 30.0
NONE_SET: Mapping[str, str | None] = MappingProxyType({})
VERSION = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


def optional_engines(pythons: Mapping[str, str | None] = NONE_SET) -> Iterator[Check]:
    """Check each engine that is installed apart from Lockstep.

    `pythons` are the interpreters of engines' environments, such as LOCKSTEP_VLLM_PYTHON, by the
    names of the engines.
    """
    for name, engine in ENGINES.items():
        if engine.package is not None:
            python = Path(pythons.get(name) or f".venv-{name}/bin/python")
            yield _in_environment(engine.title, engine.package, python, engine.install)


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
