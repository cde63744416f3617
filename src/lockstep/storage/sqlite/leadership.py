"""The leadership of a gateway that is alone."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from time import time

from lockstep.storage.protocols import LeadershipView


class AlwaysLeader:
    """A Leadership without elections: this gateway leads from its start on."""

    shared = False
    leads = True

    def __init__(self) -> None:
        self.generation = 0
        self.holder = secrets.token_hex(8)

    async def start(self, stored: int, changed: Callable[[], None]) -> None:
        """Take a generation above all before it. The time in ms keeps that true also for gateways
        that share workers but no store, as far as their clocks agree: the one that started last
        wins. Where clocks differ, two may take the same number, and `holder` tells them apart."""
        self.generation = max(stored + 1, int(time() * 1000))

    def announce(self, address: str) -> None:
        """Do nothing: no other gateway forwards calls to this one."""

    async def rise_above(self, number: int) -> int:
        self.generation = max(self.generation, number + 1)
        return self.generation

    def view(self) -> LeadershipView:
        return LeadershipView("alone", self.generation)

    async def stop(self) -> None:
        """Do nothing: no other gateway waits to lead."""
