"""Finds the Python of the environment that an engine is installed in."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.tokens.errors import BadRequest


@dataclass(frozen=True, slots=True)
class EngineInstall:
    """How an engine is installed. `option` names the setting for another Python, `needs` what has
    to be in its environment; `module` is one of this Python's when that may be used too."""

    name: str
    venv: str
    script: str
    option: str
    needs: str
    module: str | None = None


VLLM = EngineInstall(
    "vLLM",
    ".venv-vllm",
    "scripts/install-vllm.sh",
    "LOCKSTEP_VLLM_PYTHON",
    "vllm and lockstep-rl",
)
DYNAMO = EngineInstall(
    "Dynamo",
    ".venv-dynamo",
    "scripts/install-dynamo.sh",
    "--python",
    "ai-dynamo and lockstep-rl[engine]",
    module="dynamo",
)


def find_python(engine: EngineInstall, path: str | Path | None = None) -> Path:
    """The Python at `path`; by default this one where it has the engine, or that of the engine's
    own environment in this directory. Raises BadRequest when there is none."""
    if not path and engine.module and importlib.util.find_spec(engine.module) is not None:
        return Path(sys.executable)
    wanted = Path(path) if path else Path.cwd() / engine.venv / "bin/python"
    executable = shutil.which(wanted)
    if executable is None:
        raise BadRequest(
            f"there is no {engine.name} at {wanted}: run {engine.script}, or set {engine.option} "
            f"to the python of an environment that has {engine.needs}",
            param=engine.option.lstrip("-"),
        )
    return Path(executable)
