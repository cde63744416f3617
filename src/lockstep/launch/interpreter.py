"""The Python interpreter of the environment that an engine is installed in."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from lockstep.tokens.errors import BadRequest


class EngineInstall(NamedTuple):
    """An engine in an environment of its own.

    `setting` names the option for another Python, which must have the packages in `needs`. With a
    `module`, this Python is used if it has that module.
    """

    name: str
    setting: str
    needs: str
    module: str | None = None


VLLM = EngineInstall("vLLM", "LOCKSTEP_VLLM_PYTHON", "vllm and lockstep-rl")
SGLANG = EngineInstall("SGLang", "LOCKSTEP_SGLANG_PYTHON", "sglang")
DYNAMO = EngineInstall("Dynamo", "--python", "ai-dynamo and lockstep-rl[engine]", "dynamo")


def find_python(engine: EngineInstall, path: str | Path | None = None) -> Path:
    """Return the Python at `path`; by default this one if it has the engine. Otherwise return that
    of the engine's own environment in this directory. Raises BadRequest when there is none."""
    if not path and engine.module and importlib.util.find_spec(engine.module) is not None:
        return Path(sys.executable)
    name = engine.name.lower()
    python = Path(path) if path else Path.cwd() / f".venv-{name}/bin/python"
    executable = shutil.which(python)
    if executable is None:
        raise BadRequest(
            f"there is no {engine.name} at {python}: run scripts/install-{name}.sh, or set "
            f"{engine.setting} to the python of an environment that has {engine.needs}",
            param=engine.setting.lstrip("-"),
        )
    return Path(executable)
