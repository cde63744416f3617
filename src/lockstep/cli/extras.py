"""The extras of the package: which one brings a missing module, and how to install it."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "engine": ("torch", "safetensors"),
    "tinker": ("google.protobuf",),
    "train": ("peft",),
    "trl": ("trl", "datasets"),
    "verifiers": ("verifiers",),
    "otel": ("opentelemetry",),
    "export": ("pyarrow",),
    "stores": ("obstore",),
}
"""Modules that a base install lacks, by the extra that installs them."""
TRAINING = ("lockstep train", "lockstep demo")
"""Commands for which the extra `engine` alone is not enough: `train` brings it too."""


def require_extra(extra: str) -> None:
    """Raise ModuleNotFoundError for the first module of the extra that is not installed."""
    for name in EXTRAS[extra]:
        if not _is_installed(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that would hold it
        return False


def missing_extra(error: ModuleNotFoundError, command: str) -> str | None:
    """Return the error text for a command that needs the module; None if no extra installs it."""
    name = error.name or ""
    for extra, modules in EXTRAS.items():
        module = name if name in modules else name.partition(".")[0]
        if module in modules:
            whole = "train" if extra == "engine" and command in TRAINING else extra
            return (
                f"{command} needs {module}, which is not installed: "
                f"pip install 'lockstep-rl[{whole}]'"
            )
    return None
