"""The files of deploy/, read as what reads them would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def manifests() -> list[tuple[str, dict[str, Any]]]:
    """Every object of Kubernetes, with the file that it is in."""
    paths = [path for path in sorted(KUBERNETES.rglob("*.yaml")) if path.stem != "kustomization"]
    return [(path.name, each) for path in paths for each in documents(path)]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for _, each in manifests() if each["kind"] == kind}


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "docker-compose.yml").read_text()))


def command_lines() -> dict[str, list[str]]:
    """Every command line of ours in deploy/, by where it stands."""
    commands = {
        f"compose {name}": service["command"]
        for name, service in compose()["services"].items()
        if service["image"].startswith("lockstep")
    }
    for kind in ("Deployment", "StatefulSet"):
        for name, each in of_kind(kind).items():
            for container in each["spec"]["template"]["spec"]["containers"]:
                if container["image"].startswith("lockstep"):
                    commands[f"{kind} {name}"] = container["args"]
    return commands
