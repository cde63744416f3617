"""Lockstep keeps an RL trainer and a fleet of LLM inference workers in lockstep.

async with lockstep.connect("http://127.0.0.1:8000", model="tiny") as policy:
    chat = policy.chat(system="You reverse strings.", temperature=1.0)
    turn = await chat.send("Reverse: 40213")
    sample = chat.sample()
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep import models
    from lockstep.checkpoint import stores
    from lockstep.client import (
        Chat,
        Policy,
        Scores,
        Turn,
        connect,
        connect_sync,
        generate,
    )
    from lockstep.engine import exact, probe, sharded
    from lockstep.explain import explain
    from lockstep.fleet.remote import RemoteFleet
    from lockstep.tokens import (
        Completion,
        LockstepError,
        Sample,
        Sampling,
        ShapedSpan,
        VersionSpan,
        errors,
    )

try:
    __version__ = version("lockstep-rl")
except PackageNotFoundError:  # run from its source tree, without being installed
    __version__ = "0+source"
__all__ = [
    "Chat",
    "Completion",
    "LockstepError",
    "Policy",
    "Sample",
    "Sampling",
    "Scores",
    "ShapedSpan",
    "Turn",
    "VersionSpan",
    "connect",
    "connect_fleet",
    "connect_sync",
    "errors",
    "exact",
    "explain",
    "generate",
    "models",
    "probe",
    "sharded",
    "stores",
]

_TOKENS = frozenset(
    {
        "Completion",
        "LockstepError",
        "Sample",
        "Sampling",
        "ShapedSpan",
        "VersionSpan",
        "errors",
    }
)
_MODULES = {
    "exact": "lockstep.engine.exact",
    "explain": "lockstep.explain",
    "models": "lockstep.models",
    "probe": "lockstep.engine.probe",
    "sharded": "lockstep.engine.sharded",
    "stores": "lockstep.checkpoint.stores",
}
"""Submodules offered under a short name. `exact`, `probe` and `sharded` need the extra `engine`."""


def connect_fleet(
    url: str | None = None,
    *,
    token: str | None = None,
    token_file: str | Path | None = None,
    timeout: float = 1800.0,
) -> RemoteFleet:
    """Connect to the control plane of a running gateway: weights, pauses, workers, samples.

        async with lockstep.connect_fleet() as fleet:
            operation = await fleet.update_weights("run/step-1")

    Without `url`, find the gateway that this user runs on this machine, and its admin token. Pass
    `url` and `token` or `token_file` for another one. `timeout` bounds an update, in seconds.
    Raises BadRequest if no such gateway or token exists.
    """
    from lockstep.fleet.remote import RemoteFleet
    from lockstep.running_gateways import find_control_plane
    from lockstep.settings import Settings

    settings = Settings.read()
    if token is not None:
        settings = replace(settings, admin_token=token)
    where, saved_token = find_control_plane(url, Path(token_file) if token_file else None, settings)
    return RemoteFleet(where, token=token or saved_token, timeout=timeout)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `lockstep --help` imports none of them."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module = "lockstep.tokens" if name in _TOKENS else "lockstep.client"
    return getattr(import_module(module), name)
