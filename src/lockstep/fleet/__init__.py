"""Many workers: membership, routing, desired state and weight transactions.

The package can be called: `async with lockstep.fleet("http://127.0.0.1:8001", token=...) as fleet`
opens the control plane of a running gateway.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.fleet.remote import RemoteFleet


class _Callable(ModuleType):
    def __call__(
        self,
        url: str = "http://127.0.0.1:8001",
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        timeout: float = 1800.0,
    ) -> RemoteFleet:
        """The fleet behind a control plane; see RemoteFleet."""
        from lockstep.fleet.remote import RemoteFleet

        return RemoteFleet(url, token=token, token_file=token_file, timeout=timeout)


# `lockstep.fleet` is both a room of the house and what a trainer calls.
sys.modules[__name__].__class__ = _Callable
