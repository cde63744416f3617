"""The files of deploy/, read as what reads them would."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "lockstep"
HELM = Path(sys.executable).parent / "helm"
PASSWORD = ("--set", "postgres.password=a-password")
SETS = {
    "cpu-trial": ("cpu-trial",),
    "gpu-node": ("gpu-node",),
    "vllm": ("vllm",),
    "external-postgres": ("external-postgres",),
    "vllm on external-postgres": ("vllm", "external-postgres"),
}
"""Values files of the chart that are installed together."""
COMMANDS = ("gateway", "worker")


@cache
def render(name: str) -> tuple[dict[str, Any], ...]:
    """Return the objects that Helm renders from one of SETS."""
    files = [part for file in SETS[name] for part in ("-f", f"{CHART}/values/{file}.yaml")]
    output = subprocess.run(
        [HELM, "template", "lockstep", CHART, "--namespace", "rl", *files, *PASSWORD],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    return tuple(each for each in yaml.safe_load_all(output) if each)


def of_kind(name: str, kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in render(name) if each["kind"] == kind}


def pods(name: str) -> dict[str, dict[str, Any]]:
    """Return the pod specifications of a set, by the name of their owner."""
    return {
        owner: each["spec"]["template"]["spec"]
        for kind in ("Deployment", "StatefulSet")
        for owner, each in of_kind(name, kind).items()
    }


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "docker-compose.yml").read_text()))


def command_lines() -> dict[str, list[str]]:
    """Every command line of ours in deploy/, by where it stands."""
    commands = {
        f"compose {name}": service["command"]
        for name, service in compose()["services"].items()
        if service["image"].startswith("lockstep")
    }
    for name in SETS:
        for owner, pod in pods(name).items():
            for container in pod["containers"]:
                if container.get("args", [""])[0] in COMMANDS:
                    commands[f"{name}: {owner}"] = container["args"]
    return commands
