"""How a handler learns that the client of its request has gone."""

from __future__ import annotations

from collections.abc import Callable

GONE = "lockstep.gone"
"""An extension in the scope: takes what to call when the client has gone, or None for nothing."""


class Presence:
    """Whether the client of one request is there, and whom to tell when it leaves."""

    __slots__ = ("_call", "_gone")

    def __init__(self) -> None:
        self._gone = False
        self._call: Callable[[], object] | None = None

    def when_gone(self, call: Callable[[], object] | None) -> None:
        """Has `call` called when the client goes, or now if it has gone."""
        self._call = call
        if self._gone and call is not None:
            call()

    def leave(self) -> None:
        self._gone = True
        if self._call is not None:
            self._call()
