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
    from lockstep import fleet
    from lockstep.client import (
        Chat,
        Policy,
        Scores,
        Turn,
        connect,
        connect_sync,
        generate,
    )
    from lockstep.fleet.remote import RemoteFleet
    from lockstep.tokens import Completion, LockstepError, Sample, Sampling, errors

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
    "Turn",
    "connect",
    "connect_fleet",
    "connect_sync",
    "errors",
    "fleet",
    "generate",
]

_TOKENS = ("Completion", "LockstepError", "Sample", "Sampling", "errors")


def connect_fleet(
    url: str | None = None,
    *,
    token: str | None = None,
    token_file: str | Path | None = None,
    timeout: float = 1800.0,
) -> RemoteFleet:
    """The control plane of a running gateway: weights, pauses, adapters, workers, samples.

    `async with lockstep.connect_fleet() as fleet` finds the gateway of this machine and user, and
    its admin token; give `url` and `token` or `token_file` for any other. An update may take
    `timeout` seconds. Raises BadRequest when there is no such gateway, or no token.
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
    """Public names are imported when they are first used: `lockstep --help` needs none of them."""
    if name == "fleet":
        return import_module("lockstep.fleet")
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    module = "lockstep.tokens" if name in _TOKENS else "lockstep.client"
    return getattr(import_module(module), name)
