"""Who may change the fleet: the only gateway, or the one of several that was elected."""

from __future__ import annotations

from collections.abc import Callable
from time import time
from typing import Literal, Protocol

import msgspec

Role = Literal["alone", "leader", "follower"]


class GatewayView(msgspec.Struct, frozen=True):
    """A gateway of the fleet: the URL of its admin port, and seconds since it was heard of."""

    address: str
    leads: bool
    seen_seconds: float


class LeadershipView(msgspec.Struct, frozen=True):
    """Who leads, as one gateway knows it. `leader` is the admin URL, None while none is known."""

    role: Role
    generation: int
    leader: str | None = None
    gateways: tuple[GatewayView, ...] = ()


class Leadership(Protocol):
    """Whether this gateway leads, and under which number. The number rises at every election, and
    workers and stores refuse what comes under a lower one."""

    @property
    def shared(self) -> bool:
        """Whether other gateways may lead."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this gateway may change the fleet now."""
        ...

    @property
    def generation(self) -> int:
        """The number of the current leader, as far as this gateway knows."""
        ...

    async def start(self, stored: int, changed: Callable[[], None]) -> None:
        """Takes part in elections. `stored` is the highest number that the store has; `changed` is
        called when another gateway, or this one, came to lead."""
        ...

    def announce(self, address: str) -> None:
        """Tells the others the URL of this gateway's admin port."""
        ...

    async def rise_above(self, number: int) -> int:
        """The number of this leader, higher than `number` from now on. Raises Superseded when it
        leads no more."""
        ...

    def view(self) -> LeadershipView: ...

    async def stop(self) -> None:
        """Lets another gateway lead at once."""
        ...


class AlwaysLeader:
    """The leadership of a gateway that is alone."""

    shared = False
    leads = True

    def __init__(self) -> None:
        self.generation = 0

    async def start(self, stored: int, changed: Callable[[], None]) -> None:
        """The later start has the higher number, also of gateways that know nothing of each
        other."""
        self.generation = max(stored + 1, int(time() * 1000))

    def announce(self, address: str) -> None:
        """Nobody asks."""

    async def rise_above(self, number: int) -> int:
        self.generation = max(self.generation, number + 1)
        return self.generation

    def view(self) -> LeadershipView:
        return LeadershipView("alone", self.generation)

    async def stop(self) -> None:
        """Nobody waits for it."""
