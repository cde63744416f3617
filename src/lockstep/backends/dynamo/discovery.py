"""The workers of a Dynamo deployment: list them, and watch them join and leave."""

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

    `id` stays the same while the worker lives; `error` says why it is not ready. `routes` are the
    control routes that it advertises.
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
    """The current workers, and what changed since the last lookup.

    A worker that changed in any field is in `left` as it was and in `came` as it is.
    """

    now: frozenset[DiscoveredWorker]
    came: frozenset[DiscoveredWorker]
    left: frozenset[DiscoveredWorker]


class Discovery(Protocol):
    """A way to list workers."""

    async def find(self) -> frozenset[DiscoveredWorker]:
        """Return the current workers. Raises LockstepError when they cannot be listed."""
        ...

    async def close(self) -> None: ...


async def watch(discovery: Discovery, interval: float = 2.0) -> AsyncGenerator[WorkerChange, None]:
    """Yield the first set of workers, then every change, until closed or cancelled.

    A lookup that fails changes nothing: workers do not leave because a name server failed. Before
    the first success it is retried.
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


async def wait_until_ready(
    discovery: Discovery,
    count: int = 1,
    *,
    own: frozenset[str] | None = None,
    seconds: float = 300.0,
    interval: float = 1.0,
) -> frozenset[DiscoveredWorker]:
    """Return the workers once `count` of them are ready, or all with an id in `own`. Raises
    DeadlineExceeded, naming the others."""
    trouble = "discovery lists no worker"
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    workers = await discovery.find()
                    ready = frozenset(worker for worker in workers if worker.ready)
                    if own is not None:
                        count = len(own)
                        ready = frozenset(worker for worker in ready if worker.id in own)
                    if len(ready) >= count:
                        return workers
                    others = [f"{worker.id}: {worker.error}" for worker in workers - ready]
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
    DYN_RL_PORT (default 8001). A worker is ready once `identify` confirms that it is the worker at
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
        return frozenset(await asyncio.gather(*map(self._check_identity, workers)))

    async def _check_identity(self, worker: DiscoveredWorker) -> DiscoveredWorker:
        """Return the worker, marked as not ready unless it is the one at its system_url."""
        if not worker.ready or worker.admin_url is None:
            return worker
        error = await self._identify(worker.id, worker.admin_url)
        return worker if error is None else replace(worker, ready=False, error=error)

    def _worker(self, row: _Worker) -> DiscoveredWorker:
        error = row.error
        if error is None and row.system_url is None:
            error = "it reports no system_url"
        if error is None and is_loopback(row.system_url) and not is_loopback(self._client.url):
            error = (
                f"its system_url {row.system_url} is only valid on its own host: start it with "
                "--advertise and an address that this host reaches"
            )
        return DiscoveredWorker(
            id=str(row.instance_id),
            data_url=self._frontend,
            admin_url=row.system_url,
            backend="dynamo",
            model=row.model,
            ready=error is None,
            error=error,
            routes=tuple(sorted(row.routes)),
        )

    async def close(self) -> None:
        await self._client.close()


def workers_url(frontend: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return where a Dynamo frontend lists its workers. Raises BadRequest for an invalid port."""
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
