"""Membership by Dynamo's discovery: workers join and leave the fleet as discovery lists them.

Requests go through the frontend, each pinned to the worker that the fleet picked. On its own, the
frontend would also use workers that have not proved their weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from lockstep.backends.dynamo.discovery import (
    DiscoveredWorker,
    Discovery,
    WorkerChange,
    wait_until_ready,
    watch,
)
from lockstep.backends.dynamo.frontend_probe import FrontendProbeAdmin
from lockstep.backends.dynamo.transport import pinned_url
from lockstep.fleet.fleet import Fleet
from lockstep.tokens.errors import BadRequest, LockstepError, NotFound

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
LEAVE_SECONDS = 5.0
"""How long a worker that Dynamo has dropped may take to finish its requests."""


@asynccontextmanager
async def follow_discovery(
    fleet: Fleet,
    discovery: Discovery,
    *,
    token: str | None = None,
    wait_seconds: float = 60.0,
    look_seconds: float = LOOK_SECONDS,
    **options: Any,
) -> AsyncIterator[None]:
    """Keep the workers that `discovery` lists in the fleet while the block runs.

    The block begins once the first of them serves. `options` are those of `Pool.add`. Raises
    DeadlineExceeded or Unavailable when none serves within `wait_seconds`.
    """
    if options.get("api_key") is not None:
        raise BadRequest(
            "LOCKSTEP_WORKER_API_KEY is set, but Dynamo's frontend has no API keys: unset it",
            param="api_key",
        )
    if options.setdefault("transport", "dynamo") != "dynamo":
        raise BadRequest(
            f"transport is {options['transport']!r}: requests to workers behind a frontend are "
            "pinned, which only `dynamo` can do; leave it out",
            param="transport",
        )
    first = await wait_until_ready(discovery, 1, seconds=wait_seconds)
    follower = _Follower(fleet, token, options)
    await follower.apply(WorkerChange(first, first, frozenset()))
    await fleet.pool.wait_ready(1, wait_seconds)
    task = asyncio.create_task(follower.run(discovery, look_seconds), name="follow Dynamo")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(task, return_exceptions=True)


class _Follower:
    def __init__(self, fleet: Fleet, token: str | None, options: dict[str, Any]) -> None:
        self._fleet = fleet
        self._token = token
        self._options = options
        self._joined: dict[str, DiscoveredWorker] = {}

    async def run(self, discovery: Discovery, seconds: float) -> None:
        async with aclosing(watch(discovery, seconds)) as changes:
            async for change in changes:
                await self.apply(change)

    async def apply(self, change: WorkerChange) -> None:
        """Remove the workers that left, and add those that joined. A worker that cannot be added is
        refused. It is tried again when discovery lists it differently."""
        ready = {worker.id: worker for worker in change.now if worker.ready}
        refused = {w.id: w.error or "it is not ready" for w in change.now if not w.ready}
        for name in set(self._fleet.state.refused) - set(refused) - set(ready):
            del self._fleet.state.refused[name]
        for name, reason in refused.items():
            self._refuse(name, reason)
        for name, joined in list(self._joined.items()):
            if ready.get(name) != joined:
                del self._joined[name]
                await self._leave(name)
        new = [worker for name, worker in ready.items() if name not in self._joined]
        await asyncio.gather(*map(self._join, new))

    async def _join(self, worker: DiscoveredWorker) -> None:
        url = pinned_url(worker.data_url or "", worker.id)
        admin = FrontendProbeAdmin(worker, token=self._token)
        try:
            await self._fleet.add(url, admin, worker_id=worker.id, **self._options)
        except LockstepError as error:
            self._refuse(worker.id, error.message)
            await admin.close()
        else:
            self._joined[worker.id] = worker
            self._fleet.state.refused.pop(worker.id, None)

    def _refuse(self, name: str, reason: str) -> None:
        """Record why a worker is not in the fleet; log it once."""
        if self._fleet.state.refused.get(name) != reason:
            log.warning("worker %s refused: %s", name, reason)
        self._fleet.state.refused[name] = reason

    async def _leave(self, name: str) -> None:
        log.warning("worker %s left the deployment", name)
        # Wait for the operation under way: it handles workers that die, but not ones that vanish.
        async with self._fleet.operations.lock:
            with suppress(NotFound):  # an operator may have removed it
                await self._fleet.remove(name, drain_seconds=LEAVE_SECONDS)
