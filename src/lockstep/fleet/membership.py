"""The workers of a gateway among several: what one of them takes in, all get to know."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import msgspec

from lockstep.backends.registry import BackendName, open_admin
from lockstep.fleet.worker import Worker
from lockstep.http.client.client import HttpClient
from lockstep.storage.desired_state import WorkerRecord
from lockstep.storage.protocols import Leadership
from lockstep.tokens.errors import LockstepError, NotFound

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet

log = logging.getLogger(__name__)
LEAVE_SECONDS = 5.0
PROPOSE_SECONDS = 30.0
UNADDABLE = ("dynamo",)
"""Backends whose workers every gateway finds by itself: their routes are told by discovery."""


class Membership:
    """Takes in the workers of the store, lets those go that left it, and proposes new ones."""

    def __init__(self, fleet: Fleet, leadership: Leadership, token: str | None) -> None:
        self._fleet, self._leadership, self._token = fleet, leadership, token
        self.tokens: dict[str, str] = {}
        """The admin tokens of workers that have one of their own."""
        self._seen: set[str] = set()
        self._joined: set[str] = set()
        self._joining: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Ends what is under way."""
        for task in list(self._joining.values()):
            task.cancel()
        await asyncio.gather(*self._joining.values(), return_exceptions=True)

    def keep_token(self, worker_id: str, token: str) -> None:
        """That worker has an admin token of its own, which later leaders need."""
        if token != self._token:
            self.tokens[worker_id] = token

    def claim(self, worker_id: str, url: str) -> Worker | None:
        """The worker of that id and URL if it came from the store: who adds it now has found it
        too, and keeps it when the store forgets it."""
        joined = worker_id in self._joined
        for worker in self._fleet.pool.workers if joined else ():
            if (worker.id, worker.url) == (worker_id, url.rstrip("/")):
                self._joined.discard(worker_id)
                return worker
        return None

    def follow(self, known: Mapping[str, WorkerRecord]) -> None:
        """Takes in the workers that only the leader knew, and lets those of them go that left."""
        self._seen |= set(known)
        for worker in self._fleet.workers:
            if worker.control.name in UNADDABLE or worker.id in known or worker.leaving:
                continue
            if worker.id in self._seen:
                self._in_background(worker.id, self._leave(worker.id))
            else:
                self._in_background(worker.id, self._propose(worker))
        self.take_in(known)

    def take_in(self, records: Mapping[str, WorkerRecord]) -> None:
        """Adds those that are not there yet, in the background."""
        present = {worker.id for worker in self._fleet.pool.workers}
        for record in records.values():
            if record.id not in present and record.backend not in UNADDABLE:
                self._in_background(record.id, self._join(record))

    async def _propose(self, worker: Worker) -> None:
        """Tells the leader of a worker that only this gateway was given."""
        leader = self._leadership.view().leader
        if leader is None:
            return
        body = {
            "url": worker.url, "admin_url": worker.control.url, "backend": worker.control.name,
            "id": worker.id, "admin_token": self.tokens.get(worker.id, self._token),
        }  # fmt: skip
        client = HttpClient(leader, api_key=self._token, retries=0, timeout=PROPOSE_SECONDS)
        try:
            await client.post("/v1/rl/workers", msgspec.json.encode(body))
        except LockstepError as error:
            log.info("the leader did not take worker %s: %s", worker.id, error.message)
        finally:
            await client.close()

    def _in_background(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs it, unless something is under way with that worker already."""
        if name in self._joining:
            work.close()
            return
        task = asyncio.create_task(work, name=f"membership of {name}")
        self._joining[name] = task
        task.add_done_callback(lambda _: self._joining.pop(name, None))

    async def _leave(self, name: str) -> None:
        with suppress(NotFound):
            await self._fleet.remove(name, drain_seconds=LEAVE_SECONDS)
        self._joined.discard(name)

    async def _join(self, record: WorkerRecord) -> None:
        options: dict[str, Any] = {"transport": record.transport}
        if record.logprob_mode is not None:
            options["logprob_mode"] = record.logprob_mode
        token = record.admin_token or self._token
        self._joined.add(record.id)
        try:
            admin = await open_admin(
                record.admin_url or record.url, token, cast("BackendName", record.backend or "auto")
            )
            try:
                await self._fleet.take_in(record.url, admin, record.id, **options)
            except BaseException:
                await admin.close()
                raise
        except LockstepError as error:
            self._joined.discard(record.id)
            log.warning("worker %s of the leader cannot be used: %s", record.id, error.message)
            return
        if record.admin_token is not None:
            self.tokens[record.id] = record.admin_token
