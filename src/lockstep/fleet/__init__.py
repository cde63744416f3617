"""Many workers: membership, routing, desired state and weight transactions."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.fleet.remote import RemoteFleet


class _CallableModule(ModuleType):
    """Lets `lockstep.fleet(...)` go on for one release, under its new name connect_fleet.

    Importing the package makes it an attribute of `lockstep`, so the old function can only live on
    as a call of the module. Goes in 0.2, with the last line of this file.
    """

    def __call__(self, *arguments: Any, **options: Any) -> RemoteFleet:
        warnings.warn(
            "lockstep.fleet(...) is now lockstep.connect_fleet(...), with the same arguments; the "
            "old name goes in lockstep 0.2",
            DeprecationWarning,
            stacklevel=2,
        )
        # Not imported: this package lies below the one that reads settings.
        fleet: RemoteFleet = sys.modules["lockstep"].connect_fleet(*arguments, **options)
        return fleet


sys.modules[__name__].__class__ = _CallableModule
