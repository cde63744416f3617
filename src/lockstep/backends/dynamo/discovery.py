"""Where the workers of a Dynamo deployment are, and how that changes."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec

from lockstep.backends.admin import AdminName
from lockstep.backends.admin_client import BUDGETS, AdminClient, CallBudgets
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
class Found:
    """One worker. `id` stays the same while it lives; `error` says why it is not ready.

    `routes` is what a Dynamo worker advertises.
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
class Change:
    """The workers there are now, and what is new since the last look.

    A worker of which something changed has left as it was, and come as it is.
    """

    now: frozenset[Found]
    came: frozenset[Found]
    left: frozenset[Found]


class Discovery(Protocol):
    """A way to find workers."""

    async def find(self) -> frozenset[Found]:
        """The workers there are now. Raises LockstepError when that cannot be told."""
        ...

    async def close(self) -> None: ...


async def watch(discovery: Discovery, interval: float = 2.0) -> AsyncGenerator[Change, None]:
    """The first set, then every change, until it is closed or cancelled.

    A look that fails changes nothing: workers do not go because a name server did. Before the
    first success it is retried.
    """
    if not interval > 0:
        raise BadRequest(f"interval is {interval}: expected seconds > 0", param="interval")
    before: frozenset[Found] | None = None
    while True:
        try:
            now = await discovery.find()
        except LockstepError as error:
            log.warning("workers could not be looked up: %s", error.message)
        else:
            if before is None or now != before:
                old = before or frozenset()
                before = now
                yield Change(now, now - old, old - now)
        await asyncio.sleep(interval)


async def until_ready(
    discovery: Discovery, count: int = 1, *, seconds: float = 300.0, interval: float = 1.0
) -> frozenset[Found]:
    """The workers, once `count` of them are ready. Raises DeadlineExceeded, naming the others."""
    trouble = "no worker was found"
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    found = await discovery.find()
                    ready = frozenset(one for one in found if one.ready)
                    if len(ready) >= count:
                        return found
                    others = [f"{one.id}: {one.error}" for one in found - ready]
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


class Dynamo:
    """The workers of a Dynamo deployment, by GET /v1/rl/workers.

    `frontend` is where requests go. The discovery URL is `url`, or the frontend's host at the port
    DYN_RL_PORT (8001 unless set).
    """

    def __init__(
        self,
        frontend: str,
        url: str | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        budgets: CallBudgets = BUDGETS,
    ) -> None:
        self._frontend = urlunsplit(_parts(frontend, "frontend")).rstrip("/")
        self._caller = AdminClient(url or workers_url(frontend, environ))
        self._budgets = budgets

    async def find(self) -> frozenset[Found]:
        raw = await self._caller.get(ROUTE, self._budgets.quick)
        listed = self._caller.read(_Workers, self._caller.fields(raw, ROUTE), ROUTE)
        if listed.protocol_version != 1:
            raise Unavailable(
                f"{self._caller.url}{ROUTE} speaks protocol {listed.protocol_version}, expected 1"
            )
        found = [self._worker(one) for one in listed.workers]
        urls = Counter(one.admin_url for one in found if one.ready)
        return frozenset(
            replace(one, ready=False, error=f"others have its system_url {one.admin_url} too")
            if one.ready and urls[one.admin_url] > 1
            else one
            for one in found
        )

    def _worker(self, one: _Worker) -> Found:
        error = one.error
        if error is None and one.system_url is None:
            error = "it tells no system_url"
        if error is None and _loopback(one.system_url) and not _loopback(self._caller.url):
            error = f"its system_url {one.system_url} is only good on its own host"
        return Found(
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
        await self._caller.close()


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


def _loopback(url: str | None) -> bool:
    host = urlsplit(url or "").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
