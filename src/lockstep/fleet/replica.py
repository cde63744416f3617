"""One gateway of several on one store: it leads the fleet, or follows who does.

The leader writes down which workers serve, and what they have proved. A follower sends requests to
exactly those, and takes only answers under versions that the leader has accepted. It never changes
a worker. A gateway that is alone leads from its start to its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.fleet.membership import Membership
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Desired, FleetSnapshot, WorkerRecord
from lockstep.storage.protocols import ControlStore, Leadership, LeadershipView
from lockstep.tokens.errors import LockstepError, Superseded, Unavailable

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
"""How often the store is looked at although nothing was heard from it."""
TAKE_OVER_SECONDS = 10.0
CARRIED_SECONDS = 30.0
"""How long a new leader waits for the workers that the one before it knew to be found."""


class Replica:
    """Keeps `fleet` in the role that `leadership` gives it."""

    def __init__(
        self, fleet: Fleet, store: ControlStore, leadership: Leadership, token: str | None
    ) -> None:
        self._fleet, self._store, self._leadership = fleet, store, leadership
        self.membership = Membership(fleet, leadership, token)
        self._led = 0
        self._known: dict[str, WorkerRecord] = {}
        self._published: tuple[WorkerRecord, ...] | None = None
        self._revision = -1
        self._carried: dict[str, WorkerRecord] = {}
        self._carried_until = 0.0
        self._news = asyncio.Event()
        self._reading = asyncio.Lock()
        # What is published was true before an agreement is false after it.
        self._writing = asyncio.Lock()
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
        await self.membership.close()
        await self._leadership.stop()

    def records(
        self, proved: Sequence[Worker] | None = None, version: str | None = None
    ) -> list[WorkerRecord] | None:
        """The workers as followers shall see them; None where nobody follows.

        With `proved`, only those serve, under `version`: what the fleet decides at this moment.
        """
        if not self._leadership.shared:
            return None
        self._found()
        return [*self._carried.values(), *self._own_records(proved, version)]

    def _found(self) -> None:
        """Those that were found are this leader's own now, and go when they are removed."""
        if monotonic() > self._carried_until:
            self._carried = {}
        for worker in self._fleet.pool.workers:
            self._carried.pop(worker.id, None)

    def _own_records(
        self, proved: Sequence[Worker] | None, version: str | None
    ) -> list[WorkerRecord]:
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

    def view(self) -> LeadershipView:
        """Who leads. A gateway that was elected and still takes the workers over follows."""
        view = self._leadership.view()
        return view if self._fleet.leads else msgspec.structs.replace(view, role="follower")

    async def leads_soon(self) -> bool:
        """Whether it leads, once it has taken the workers over if it was just elected."""
        deadline = monotonic() + TAKE_OVER_SECONDS
        while self._leadership.leads and not self._fleet.leads and monotonic() < deadline:
            await asyncio.sleep(0.02)
        return self._fleet.leads

    def check_leads(self) -> None:
        """Raises Unavailable that names the leader when this gateway does not lead."""
        if not self._fleet.leads:
            leader = self.view().leader
            where = f"{leader} does" if leader else "none is known yet"
            raise Unavailable(f"this gateway does not lead the fleet, {where}", retry_after=1.0)

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
            self.membership.tokens.get(worker.id),
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
            self.membership.take_in(self._carried)
            await self._publish()
        elif not fleet.leads:
            await self.read()
            self.membership.follow(self._known)

    async def _lead(self, generation: int) -> None:
        async with self._reading:
            # What the leader before it knew, it must know too before it writes down who is there.
            await self._follow(await self._store.snapshot())
            self._carried = dict(self._known)
            self._carried_until = monotonic() + CARRIED_SECONDS
            self._found()
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
