"""Lists the workers of a Dynamo deployment, and watches them come and go."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec

from lockstep.backends.admin import AdminName
from lockstep.backends.admin_client import BUDGETS, AdminClient, CallBudgets
from lockstep.backends.dynamo.identity import Identify, Identities
from lockstep.protocol.dynamo.environment import is_loopback
from lockstep.tokens.errors import (
    BadRequest,
    DeadlineExceeded,
    LockstepError,
    Unavailable,
)

log = logging.getLogger(__name__)
RL_PORT = 8001
RL_PORT_VARIABLE = "DYN_RL_PORT"
ROUTE = "/v1/rl/workers"


@dataclass(frozen=True, slots=True)
class DiscoveredWorker:
    """One worker of a deployment.

    `id` stays the same while it lives; `error` says why it is not ready. `routes` is what it
    advertises.
    """

    id: str
    data_url: str | None
    admin_url: str | None
    backend: AdminName | None = None
    model: str | None = None
    ready: bool = True
    error: str | None = None
    routes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """The workers there are now, and what is new since the last lookup.

    A worker of which something changed has left as it was, and come as it is.
    """

    now: frozenset[DiscoveredWorker]
    came: frozenset[DiscoveredWorker]
    left: frozenset[DiscoveredWorker]


class Discovery(Protocol):
    """A way to find workers."""

    async def find(self) -> frozenset[DiscoveredWorker]:
        """The workers there are now. Raises LockstepError when that cannot be told."""
        ...

    async def close(self) -> None: ...


async def watch(discovery: Discovery, interval: float = 2.0) -> AsyncGenerator[WorkerChange, None]:
    """The first set, then every change, until it is closed or cancelled.

    A lookup that fails changes nothing: workers do not go because a name server did. Before the
    first success it is retried.
    """
    if not interval > 0:
        raise BadRequest(f"interval is {interval}: expected seconds > 0", param="interval")
    before: frozenset[DiscoveredWorker] | None = None
    while True:
        try:
            now = await discovery.find()
        except LockstepError as error:
            log.warning("workers could not be looked up: %s", error.message)
        else:
            if before is None or now != before:
                old = before or frozenset()
                before = now
                yield WorkerChange(now, now - old, old - now)
        await asyncio.sleep(interval)


async def until_ready(
    discovery: Discovery,
    count: int = 1,
    *,
    own: frozenset[str] | None = None,
    seconds: float = 300.0,
    interval: float = 1.0,
) -> frozenset[DiscoveredWorker]:
    """The workers, once `count` of them are ready, or all with an id in `own`. Raises
    DeadlineExceeded, naming the others."""
    trouble = "discovery lists no worker"
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    workers = await discovery.find()
                    ready = frozenset(one for one in workers if one.ready)
                    if own is not None:
                        count = len(own)
                        ready = frozenset(one for one in ready if one.id in own)
                    if len(ready) >= count:
                        return workers
                    others = [f"{one.id}: {one.error}" for one in workers - ready]
                    trouble = f"{len(ready)} are ready; {'; '.join(sorted(others)[:5])}"
                except LockstepError as error:
                    trouble = error.message
                await asyncio.sleep(interval)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{count} workers were not ready within {seconds:g} s: {trouble}"
        ) from None


class _Worker(msgspec.Struct):
    instance_id: int | str
    system_url: str | None = None
    model: str | None = None
    routes: list[str] = []
    error: str | None = None


class _Workers(msgspec.Struct):
    protocol_version: int
    workers: list[_Worker]


class DynamoDiscovery:
    """The workers of a Dynamo deployment, by GET /v1/rl/workers.

    `frontend` is where requests go. The discovery URL is `url`, or the frontend's host at the port
    DYN_RL_PORT (8001 unless set). A worker is ready once `identify` finds it, and nobody else, at
    its system_url.
    """

    def __init__(
        self,
        frontend: str,
        url: str | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        budgets: CallBudgets = BUDGETS,
        identify: Identify | None = None,
    ) -> None:
        self._frontend = urlunsplit(_parts(frontend, "frontend")).rstrip("/")
        self._client = AdminClient(url or workers_url(frontend, environ))
        self._budgets = budgets
        self._identify = identify or Identities()

    async def find(self) -> frozenset[DiscoveredWorker]:
        raw = await self._client.get(ROUTE, self._budgets.quick)
        listed = self._client.convert(_Workers, self._client.decode_object(raw, ROUTE), ROUTE)
        if listed.protocol_version != 1:
            raise Unavailable(
                f"{self._client.url}{ROUTE} speaks protocol {listed.protocol_version}, expected 1"
            )
        workers = map(self._worker, listed.workers)
        return frozenset(await asyncio.gather(*map(self._identified, workers)))

    async def _identified(self, one: DiscoveredWorker) -> DiscoveredWorker:
        """The worker; not ready unless it is the one at its system_url."""
        if not one.ready or one.admin_url is None:
            return one
        error = await self._identify(one.id, one.admin_url)
        return one if error is None else replace(one, ready=False, error=error)

    def _worker(self, one: _Worker) -> DiscoveredWorker:
        error = one.error
        if error is None and one.system_url is None:
            error = "it tells no system_url"
        if error is None and is_loopback(one.system_url) and not is_loopback(self._client.url):
            error = (
                f"its system_url {one.system_url} is only good on its own host: start it with "
                "--advertise and an address that this host reaches"
            )
        return DiscoveredWorker(
            id=str(one.instance_id),
            data_url=self._frontend,
            admin_url=one.system_url,
            backend="dynamo",
            model=one.model,
            ready=error is None,
            error=error,
            routes=tuple(sorted(one.routes)),
        )

    async def close(self) -> None:
        await self._client.close()


def workers_url(frontend: str, environ: Mapping[str, str] = os.environ) -> str:
    """Where a Dynamo frontend's workers are listed. Raises BadRequest for a port that is none."""
    port = environ.get(RL_PORT_VARIABLE) or str(RL_PORT)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise BadRequest(f"{RL_PORT_VARIABLE} is {port!r}: expected a port", param="port")
    parts = _parts(frontend, "frontend")
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def _parts(url: str, field: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadRequest(f"{field} is {url!r}: expected http://HOST:PORT", param=field)
    return parts
