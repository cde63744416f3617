"""`lockstep gateway --discover`: the workers behind a host name, such as a headless Service."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.cli.serving.model_identity import ModelIdentity, served_model
from lockstep.cli.serving.sources import ShowStatus, WorkerRows
from lockstep.tokens.errors import BadRequest, LockstepError, NotFound

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet
    from lockstep.fleet.worker import Worker

log = logging.getLogger(__name__)
LOOKUP_SECONDS = 2.0
"""Between two look-ups; Kubernetes caches its answers for up to 30 s."""
MISSED_LOOKUPS = 2
"""Look-ups in a row that must lack a worker before it is drained."""


@dataclass(frozen=True, slots=True)
class DnsWorkers:
    """One worker for each address that the host name of `url` has, looked up all the time.

    With an `admin_url` of the same host their weights can be updated; `admin_token` is the token of
    their admin ports, by default the gateway's. Workers of several gateways on one store are added
    and removed by the leader alone.
    """

    url: str
    admin_url: str | None
    worker_options: dict[str, Any]
    wait_seconds: float
    admin_token: str | None = None
    starts_workers = False

    @classmethod
    def parse(cls, value: str, **options: Any) -> DnsWorkers:
        """Read URL[,ADMIN_URL]. Raises BadRequest for URLs without a port or of two hosts."""
        url, _, admin_url = value.partition(",")
        for part in (url, admin_url) if admin_url else (url,):
            parts = urlsplit(part)
            if parts.port is None or parts.hostname != urlsplit(url).hostname:
                raise BadRequest(
                    f"--discover is {value!r}: expected http://NAME:PORT,http://NAME:ADMIN_PORT "
                    "with one name for both",
                    param="discover",
                )
        return cls(url, admin_url or None, **options)

    async def identity(self) -> ModelIdentity:
        """The identity of the model that the first worker to respond serves."""
        options = {k: v for k, v in self.worker_options.items() if k != "logprob_mode"}
        name = await served_model([self.url], self.wait_seconds, options)
        return ModelIdentity.of_fleet(name, [self.url])

    @asynccontextmanager
    async def joined(self, fleet: Fleet, token: str, show: ShowStatus) -> AsyncIterator[WorkerRows]:
        """The workers are in the fleet while the block runs, which begins when one serves."""
        show(f"Looking up the workers of {self.url}")
        async with fleet.pool, fleet:
            following = asyncio.create_task(self._follow(fleet, self.admin_token or token))
            try:
                await fleet.pool.wait_ready(1, self.wait_seconds)
                yield [
                    {"id": worker.id, "url": worker.url, "system_url": None, "pid": None}
                    for worker in fleet.pool.workers
                ]
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following

    async def _follow(self, fleet: Fleet, token: str) -> None:
        """Add workers whose address is new, and remove those whose address is gone."""
        missed: Counter[str] = Counter()
        async with asyncio.TaskGroup() as removals:
            while True:
                addresses = await self._addresses()
                if addresses and fleet.state.leads:
                    await self._add_new(fleet, addresses, token)
                    for worker in self._gone(fleet, addresses, missed):
                        log.warning("worker %s left %s: draining it", worker.id, self.url)
                        # In the background: draining takes up to 30 s, and new workers must not
                        # wait for that.
                        removals.create_task(_remove(fleet, worker))
                await asyncio.sleep(LOOKUP_SECONDS)

    async def _addresses(self) -> set[str]:
        """Return the addresses of the name; none where the look-up fails.

        A failed look-up says nothing about the workers, so that none is removed for it.
        """
        parts = urlsplit(self.url)
        try:
            rows = await asyncio.get_running_loop().getaddrinfo(
                parts.hostname, parts.port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            log.info("%s cannot be looked up: %s", parts.hostname, error)
            return set()
        return {str(row[4][0]) for row in rows}

    async def _add_new(self, fleet: Fleet, addresses: set[str], token: str) -> None:
        present = {worker.url for worker in fleet.pool.workers}
        for address in sorted(addresses):
            if (url := _at(self.url, address)) in present:
                continue
            try:
                await self._add(fleet, url, address, token)
            except LockstepError as error:  # not up yet: the next round tries it again
                log.info("worker %s is not taken in yet: %s", url, error.message)

    async def _add(self, fleet: Fleet, url: str, address: str, token: str) -> None:
        from lockstep.backends.registry import open_admin

        if self.admin_url is None:
            await fleet.pool.add(url, **self.worker_options)
            return
        admin = await open_admin(_at(self.admin_url, address), token)
        try:
            worker = await fleet.add(url, admin, **self.worker_options)
        except BaseException:
            await admin.close()
            raise
        fleet.membership.keep_token(worker.id, token)

    def _gone(self, fleet: Fleet, addresses: set[str], missed: Counter[str]) -> list[Worker]:
        """Return the workers that MISSED_LOOKUPS look-ups in a row did not list."""
        gone = []
        for worker in fleet.pool.workers:
            address = self._address_of(worker.url)
            if address is None or address in addresses or worker.leaving:
                missed.pop(worker.id, None)
                continue
            missed[worker.id] += 1
            if missed[worker.id] >= MISSED_LOOKUPS:
                gone.append(worker)
        return gone

    def _address_of(self, url: str) -> str | None:
        """Return the address of a worker that came from this name; None for any other worker.

        Also for one that an earlier process found, and that is in the store.
        """
        own, other = urlsplit(self.url), urlsplit(url)
        if (own.scheme, own.port) != (other.scheme, other.port) or other.hostname is None:
            return None
        try:
            return str(ipaddress.ip_address(other.hostname))
        except ValueError:
            return None


async def _remove(fleet: Fleet, worker: Worker) -> None:
    with suppress(NotFound):  # an operator was faster
        if worker.admin is None:
            await fleet.pool.remove(worker.id)
        else:
            await fleet.remove(worker.id)


def _at(url: str, address: str) -> str:
    """Return the URL with an address in place of its host name."""
    parts = urlsplit(url)
    host = f"[{address}]" if ":" in address else address
    return f"{parts.scheme}://{host}:{parts.port}"
