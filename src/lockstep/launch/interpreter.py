"""Finds the Python of the environment that an engine is installed in."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from lockstep.tokens.errors import BadRequest


class EngineInstall(NamedTuple):
    """An engine in an environment of its own. `setting` names another Python, which must have what
    it `needs`; `module` is given where this Python may be used, if it has that."""

    name: str
    setting: str
    needs: str
    module: str | None = None


VLLM = EngineInstall("vLLM", "LOCKSTEP_VLLM_PYTHON", "vllm and lockstep-rl")
DYNAMO = EngineInstall("Dynamo", "--python", "ai-dynamo and lockstep-rl[engine]", "dynamo")


def find_python(engine: EngineInstall, path: str | Path | None = None) -> Path:
    """The Python at `path`; by default this one where it has the engine, or that of the engine's
    own environment in this directory. Raises BadRequest when there is none."""
    if not path and engine.module and importlib.util.find_spec(engine.module) is not None:
        return Path(sys.executable)
    name = engine.name.lower()
    wanted = Path(path) if path else Path.cwd() / f".venv-{name}/bin/python"
    executable = shutil.which(wanted)
    if executable is None:
        raise BadRequest(
            f"there is no {engine.name} at {wanted}: run scripts/install-{name}.sh, or set "
            f"{engine.setting} to the python of an environment that has {engine.needs}",
            param=engine.setting.lstrip("-"),
        )
    return Path(executable)
