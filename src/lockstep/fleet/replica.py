"""One gateway of several on one store: it leads the fleet, or follows who does.

The leader writes down which workers serve, and what they have proved. A follower sends requests to
exactly those, and takes only answers under versions that the leader has accepted. It never changes
a worker. A gateway that is alone leads from its start to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from lockstep.backends.registry import BackendName, open_admin
from lockstep.fleet.control.desired import Desired
from lockstep.fleet.control.leadership import Leadership
from lockstep.fleet.control.store import ControlStore, FleetSnapshot, WorkerRecord
from lockstep.fleet.worker import Worker
from lockstep.tokens.errors import LockstepError, NotFound, Superseded, Unavailable

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""How often the store is looked at although nothing was heard from it."""
LEAVE_SECONDS = 5.0
UNADDABLE = ("dynamo",)
"""Backends whose workers every gateway finds by itself: their routes are told by discovery."""


class Replica:
    """Keeps `fleet` in the role that `leadership` gives it."""

    def __init__(
        self, fleet: Fleet, store: ControlStore, leadership: Leadership, token: str | None
    ) -> None:
        self._fleet, self._store, self._leadership = fleet, store, leadership
        self._token = token
        self._led = 0
        self._known: dict[str, WorkerRecord] = {}
        self._published: tuple[WorkerRecord, ...] | None = None
        self._revision = -1
        self._joined: set[str] = set()
        self._tokens: dict[str, str] = {}
        self._news = asyncio.Event()
        self._reading = asyncio.Lock()
        # What is published was true before an agreement is false after it.
        self._writing = asyncio.Lock()
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Leads, or follows the leader that there is. Raises Unavailable when the store is away."""
        stored = (await self._store.desired()).generation
        await self._leadership.start(stored, self._news.set)
        if not self._leadership.shared:
            await self._fleet.lead(self._leadership.generation)
            return
        await self._store.watch(self._news.set)
        self._fleet.pool.accepted.read_anew = self.read
        await self._keep_role()
        self._task = asyncio.create_task(self._run(), name="replica")

    async def stop(self) -> None:
        """Lets another gateway lead."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for task in list(self._joining.values()):
            task.cancel()
        await asyncio.gather(*self._joining.values(), return_exceptions=True)
        await self._leadership.stop()

    def keep_token(self, worker_id: str, token: str) -> None:
        """That worker has an admin token of its own, which later leaders need."""
        self._tokens[worker_id] = token

    def claim(self, worker_id: str, url: str) -> Worker | None:
        """The worker of that id and URL if it came from the store: who adds it now has found it
        too, and keeps it when the store forgets it."""
        joined = worker_id in self._joined
        for worker in self._fleet.pool.workers if joined else ():
            if (worker.id, worker.url) == (worker_id, url.rstrip("/")):
                self._joined.discard(worker_id)
                return worker
        return None

    def records(
        self, proved: Sequence[Worker] | None = None, version: str | None = None
    ) -> list[WorkerRecord] | None:
        """The workers as followers shall see them; None where nobody follows.

        With `proved`, only those serve, under `version`: what the fleet decides at this moment.
        """
        if not self._leadership.shared:
            return None
        return [
            self._record(
                worker,
                worker.routable if proved is None else worker in proved,
                worker.version if proved is None or worker not in proved else version,
            )
            for worker in self._fleet.workers
            if not worker.leaving
        ]

    def admit(self, worker: Worker) -> None:
        """The gate of a follower. Raises Unavailable unless the leader says that it serves what is
        desired."""
        record = self._known.get(worker.id)
        if (why := self._why_not(worker, record)) is not None:
            raise Unavailable(why)
        worker.become("syncing", worker.reason)
        worker.become("proving", worker.reason)
        worker.version = None if record is None else record.version

    async def agree(self, desired: Desired, proved: Sequence[Worker]) -> None:
        """Writes down that the fleet serves `desired` from now on, on the workers that proved it.

        Followers see both or neither. Raises Unavailable or Superseded when nothing was written.
        """
        async with self._writing:
            await self._store.save(desired, self.records(proved, desired.version))

    async def read(self) -> None:
        """Follows what the leader has decided by now. Raises Unavailable when the store is away."""
        async with self._reading:
            if not self._fleet.leads:
                await self._follow(await self._store.snapshot())

    def _record(self, worker: Worker, serving: bool, version: str | None) -> WorkerRecord:
        return WorkerRecord(
            worker.id,
            worker.url,
            serving,
            version,
            worker.state,
            worker.reason,
            worker.control.url,
            worker.control.name,
            self._tokens.get(worker.id),
            worker.options.get("transport"),
            worker.options.get("logprob_mode"),
        )

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._wait()
            self._news.clear()
            try:
                await self._keep_role()
            except LockstepError as error:
                log.warning("this gateway cannot follow its store: %s", error.message)
            except Exception:
                # Whatever it was: a gateway that never looks again would serve what is past.
                log.exception("this gateway cannot follow its store")

    async def _wait(self) -> None:
        """Returns at news from the store, and on the leader when other workers serve than did."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._news.wait())]
        if self._fleet.leads:
            waits.append(asyncio.ensure_future(self._fleet.pool.changed()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def _keep_role(self) -> None:
        leadership, fleet = self._leadership, self._fleet
        generation = leadership.generation if leadership.leads else 0
        if self._led and generation < self._led:
            await self._stand_down("this gateway leads no more: send it again")
        if generation and not self._led:
            await self._lead(generation)
        if self._led:
            await self._publish()
        elif not fleet.leads:
            await self.read()
            self._follow_membership()

    async def _lead(self, generation: int) -> None:
        async with self._reading:  # the last news as a follower come first, or never
            await self._fleet.lead(generation)
        self._led, self._published = generation, None
        log.info("this gateway leads the fleet as generation %d", generation)

    async def _stand_down(self, reason: str) -> None:
        self._led, self._revision = 0, -1
        await self._fleet.stand_down(reason)
        self._fleet.pool.accepted.read_anew = self.read

    async def _publish(self) -> None:
        async with self._writing:
            records = tuple(self.records() or ())
            if records == self._published:
                return
            try:
                await self._store.publish(records)
            except Superseded:
                self._news.set()
                return
            self._published = records

    async def _follow(self, snapshot: FleetSnapshot) -> None:
        if snapshot.revision == self._revision:
            return
        fleet, pool = self._fleet, self._fleet.pool
        fleet.desired = snapshot.desired
        pool.accepted.follow(snapshot.desired.agreed)
        self._known = {record.id: record for record in snapshot.workers}
        self._revision = snapshot.revision
        for worker in fleet.workers:
            why = self._why_not(worker, self._known.get(worker.id))
            if worker.serves and why is not None:
                pool.eject(worker.id, why)
            elif worker.serves:
                worker.version = snapshot.desired.version
            elif why is None and not worker.leaving:
                pool.check(worker.id)

    def _follow_membership(self) -> None:
        """Takes in the workers that only the leader knew, and lets those of them go that left."""
        present = {worker.id for worker in self._fleet.pool.workers}
        for name in self._joined - set(self._known):
            self._in_background(name, self._leave(name))
        for record in self._known.values():
            if record.id not in present and record.backend not in UNADDABLE:
                self._in_background(record.id, self._join(record))

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
            self._tokens[record.id] = record.admin_token

    def _why_not(self, worker: Worker, record: WorkerRecord | None) -> str | None:
        """Why a follower sends nothing to a worker; None when it may."""
        if record is None:
            return "the leader does not know it: add it there (POST /v1/rl/workers)"
        if record.url != worker.url:
            return f"the leader knows another worker of this id, at {record.url}"
        if not record.serving:
            return f"the leader has it {record.state}: {record.reason}"
        if record.version != self._fleet.desired.version:
            return f"it has proved {record.version!r}, not {self._fleet.desired.version!r}"
        return None
