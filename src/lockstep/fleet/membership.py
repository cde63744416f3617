"""Workers of several gateways on one store: a worker added to one gateway joins all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from lockstep.backends.registry import open_admin
from lockstep.fleet.state import FleetState
from lockstep.fleet.worker import Worker
from lockstep.http.client.client import HttpClient
from lockstep.storage.desired_state import WorkerRecord
from lockstep.tokens.errors import DeadlineExceeded, LockstepError, NotFound, Unavailable

log = logging.getLogger(__name__)
LEAVE_SECONDS = 5.0
PROPOSE_SECONDS = 30.0
GONE_SECONDS = 5.0
"""How long a worker may take to answer before another one may take over its id."""
UNADDABLE = ("dynamo",)
"""Backends whose workers every gateway discovers by itself: discovery lists their routes."""


class Membership:
    """Adds the workers that the store lists, removes those that left it, and proposes new ones.

    `token` is the admin token of the gateways, and of every worker without one of its own.
    """

    def __init__(self, state: FleetState, token: str | None) -> None:
        self._state, self._token = state, token
        self.tokens: dict[str, str] = {}
        """Admin tokens of workers that have their own, by worker id."""
        self._listed: set[str] = set()
        self._from_store: set[str] = set()
        self._adding: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def close(self) -> None:
        """Cancel joins, departures and proposals under way."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def keep_token(self, worker_id: str, token: str) -> None:
        """Store the admin token of a worker, so that later leaders can control it."""
        if token != self._token:
            self.tokens[worker_id] = token

    def claim(self, worker_id: str, url: str) -> Worker | None:
        """Return the worker of that id and URL if it joined through the store. The caller adds it
        by itself, so it stays when the store drops it."""
        joined = worker_id in self._from_store
        for worker in self._state.pool.workers if joined else ():
            if (worker.id, worker.url) == (worker_id, url.rstrip("/")):
                self._from_store.discard(worker_id)
                return worker
        return None

    @asynccontextmanager
    async def adding(self, worker_id: str, url: str) -> AsyncIterator[None]:
        """Leave an id to the caller, who adds a worker under it in the block.

        A worker of that id at another URL is dropped if it does not respond: its process has ended,
        and was started again as the worker that is added now. A restarted `lockstep serve` finds
        such workers of its earlier run in the store.
        """
        self._adding.add(worker_id)
        try:
            if (task := self._tasks.get(worker_id)) is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            for worker in self._state.workers:
                if (
                    worker.id == worker_id
                    and worker.url != url.rstrip("/")
                    and await _is_gone(worker)
                ):
                    log.info("worker %s moved from %s to %s", worker_id, worker.url, url)
                    await self._leave(worker_id, drain_seconds=0.0)
            yield
        finally:
            self._adding.discard(worker_id)

    def follow(self, records: Mapping[str, WorkerRecord]) -> None:
        """Add the workers that the leader lists, and remove those that it no longer lists. A worker
        that the leader has never listed was added here: it is proposed to the leader."""
        self._listed |= set(records)
        for worker in self._state.workers:
            if worker.control.name in UNADDABLE or worker.leaving:
                continue
            if (record := records.get(worker.id)) is not None:
                self._follow_move(worker, record)
            elif worker.id in self._listed:
                self._in_background(worker.id, self._leave(worker.id))
            else:
                self._in_background(worker.id, self._propose(worker))
        self.take_in(records)

    def _follow_move(self, worker: Worker, record: WorkerRecord) -> None:
        """Settle a worker that has another URL here than at the leader."""
        if record.url == worker.url:
            return
        if worker.id in self._from_store:
            self._in_background(worker.id, self._leave(worker.id))  # it joins again from the record
        elif not record.serving:
            self._in_background(worker.id, self._propose(worker))

    def take_in(self, records: Mapping[str, WorkerRecord]) -> None:
        """Add the workers that are missing here, in the background."""
        present = {worker.id for worker in self._state.pool.workers} | self._adding
        for record in records.values():
            if record.id not in present and record.backend not in UNADDABLE:
                self._in_background(record.id, self._join(record))

    async def _propose(self, worker: Worker) -> None:
        """Send the leader a worker that was added to this gateway only."""
        leader = self._state.leadership.view().leader
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
            log.info("the leader rejected worker %s: %s", worker.id, error.message)
        finally:
            await client.close()

    def _in_background(self, worker_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Start `work`, unless other work on that worker is under way."""
        if worker_id in self._tasks:
            work.close()
            return
        task = asyncio.create_task(work, name=f"membership of {worker_id}")
        self._tasks[worker_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(worker_id, None))

    async def _leave(self, worker_id: str, drain_seconds: float = LEAVE_SECONDS) -> None:
        with suppress(NotFound):
            await self._state.remove(worker_id, drain_seconds=drain_seconds)
        self._from_store.discard(worker_id)

    async def _join(self, record: WorkerRecord) -> None:
        options: dict[str, Any] = {"transport": record.transport, "gpus": record.gpus}
        if record.logprob_mode is not None:
            options["logprob_mode"] = record.logprob_mode
        token = record.admin_token or self._token
        self._from_store.add(record.id)
        try:
            admin = await open_admin(
                record.admin_url or record.url, token, record.backend or "auto"
            )
            try:
                await self._state.take_in(record.url, admin, record.id, **options)
            except BaseException:
                await admin.close()
                raise
        except LockstepError as error:
            self._from_store.discard(record.id)
            log.warning("worker %s of the leader cannot be used: %s", record.id, error.message)
            return
        if record.admin_token is not None:
            self.tokens[record.id] = record.admin_token


async def _is_gone(worker: Worker) -> bool:
    """Return whether nothing responds at the URL of a worker."""
    if worker.serves:
        return False
    try:
        await worker.health(GONE_SECONDS)
    except (Unavailable, DeadlineExceeded):
        return True
    except LockstepError:
        return False  # something answers there
    return False
