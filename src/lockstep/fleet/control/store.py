"""Where a fleet keeps what it decided: one interface, for one gateway and for several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from lockstep.fleet.control.desired import Desired, StateStore
from lockstep.tokens.operation import Operation


class WorkerRecord(msgspec.Struct, frozen=True):
    """What the leader knows of a worker, for the gateways that follow it.

    Requests may go to it while it is `serving`, and only under `version`, which it has proved.
    `admin_token` is None where it is the token of the gateways.
    """

    id: str
    url: str
    serving: bool
    version: str | None
    state: str
    reason: str | None = None
    admin_url: str | None = None
    backend: str | None = None
    admin_token: str | None = None
    transport: str | None = None
    logprob_mode: str | None = None


class FleetSnapshot(msgspec.Struct, frozen=True):
    """Desired state and workers as they were at one moment. `revision` rises with every change."""

    desired: Desired
    workers: tuple[WorkerRecord, ...]
    revision: int


class ControlStore(Protocol):
    """Desired state, operations and workers of a fleet.

    Every method raises Unavailable when the store is away. What writes raises Superseded when
    another gateway leads by now, and has then written nothing.
    """

    async def desired(self) -> Desired: ...

    async def save(self, desired: Desired, workers: Sequence[WorkerRecord] | None = None) -> None:
        """Durable when it returns; with `workers`, both or neither."""
        ...

    async def record(self, operation: Operation) -> None:
        """Writes an operation as it stands; the oldest go when there are too many."""
        ...

    async def cut_off(self) -> None:
        """Marks what an earlier leader left running as lost."""
        ...

    async def operation(self, operation_id: str) -> Operation | None: ...

    async def by_key(self, key: str) -> Operation | None:
        """The last operation of that key."""
        ...

    async def latest(self, count: int) -> list[Operation]:
        """The last ones, newest first."""
        ...

    async def publish(self, workers: Sequence[WorkerRecord]) -> None:
        """These are the workers from now on, for the gateways that follow."""
        ...

    async def snapshot(self) -> FleetSnapshot: ...

    async def watch(self, changed: Callable[[], None]) -> None:
        """Has `changed` called whenever the snapshot may have become another one."""
        ...

    async def close(self) -> None: ...


class LocalStore:
    """The store of a gateway that is alone: a StateStore, which nobody else reads or writes."""

    def __init__(self, state: StateStore | None = None) -> None:
        self._state = state or StateStore()

    async def desired(self) -> Desired:
        return await asyncio.to_thread(self._state.desired)

    async def save(self, desired: Desired, workers: Sequence[WorkerRecord] | None = None) -> None:
        await asyncio.to_thread(self._state.save, desired)

    async def record(self, operation: Operation) -> None:
        await asyncio.to_thread(self._state.record, operation)

    async def cut_off(self) -> None:
        await asyncio.to_thread(self._state.cut_off)

    async def operation(self, operation_id: str) -> Operation | None:
        return await asyncio.to_thread(self._state.operation, operation_id)

    async def by_key(self, key: str) -> Operation | None:
        return await asyncio.to_thread(self._state.by_key, key)

    async def latest(self, count: int) -> list[Operation]:
        return await asyncio.to_thread(self._state.latest, count)

    async def publish(self, workers: Sequence[WorkerRecord]) -> None:
        """Nobody follows."""

    async def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(await self.desired(), (), 0)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Nobody else changes it."""

    async def close(self) -> None:
        self._state.close()
