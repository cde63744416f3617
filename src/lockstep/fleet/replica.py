"""One gateway of several on one store: it leads the fleet, or follows the leader.

The leader writes to the store which workers serve and what they have proved. A follower sends
requests to exactly those workers, and accepts only completions under versions that the leader has
accepted. It never changes a worker. A gateway that is alone always leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import msgspec

from lockstep.fleet.leader import Leader
from lockstep.fleet.membership import Membership
from lockstep.fleet.state import FleetState
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Desired, FleetSnapshot, WorkerRecord
from lockstep.storage.protocols import LeadershipView
from lockstep.tokens.errors import Conflict, LockstepError, Superseded, Unavailable

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
"""Longest time between two reads of the store, in case a notification was lost."""
TAKE_OVER_SECONDS = 10.0
CARRIED_SECONDS = 30.0
"""How long a new leader keeps records of workers that the earlier leader had and it has not."""
FRESH_SECONDS = 10.0
"""How long a gateway that starts over waits to lead. A gateway that was killed is counted as alive
for 5 s."""


class Replica:
    """Keeps a gateway in the role that its `leadership` assigns: leader or follower.

    With `fresh`, it starts as leader of a fleet without state and workers, or not at all.
    """

    def __init__(
        self, state: FleetState, leader: Leader, membership: Membership, *, fresh: bool = False
    ) -> None:
        self._state, self._leader, self._membership = state, leader, membership
        self._fresh = fresh
        self._led_generation = 0
        self._records: dict[str, WorkerRecord] = {}
        self._published: tuple[WorkerRecord, ...] | None = None
        self._revision = -1
        self._carried: dict[str, WorkerRecord] = {}
        self._carried_until = 0.0
        self._news = asyncio.Event()
        self._reading = asyncio.Lock()
        # Held from building the records to writing them. Records built before an agreement hold the
        # old version; written after it, they would take every worker from the followers.
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Lead, or follow the current leader. Raises Unavailable when the store is unreachable, and
        Conflict when other gateways use a store whose state must be dropped."""
        state = self._state
        stored = (await state.store.desired()).generation
        await state.leadership.start(stored, self._news.set)
        if not state.leadership.shared:
            await self._leader.start(state.leadership.generation)
            return
        await state.store.watch(self._news.set)
        state.pool.accepted.read_anew = self.read
        if self._fresh:
            await self._wait_to_start_over()
        await self._update_role()
        self._task = asyncio.create_task(self._run(), name="replica")

    async def stop(self) -> None:
        """Stop leading or following. Another gateway may lead at once."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._membership.close()
        await self._state.leadership.stop()

    def admit(self, worker: Worker) -> None:
        """Let a worker serve on a follower. Raises Unavailable unless the leader's record says that
        it serves the desired version."""
        record = self._records.get(worker.id)
        if (reason := self._rejection(worker, record)) is not None:
            raise Unavailable(reason)
        worker.become("syncing", worker.reason)
        worker.become("proving", worker.reason)
        worker.version = None if record is None else record.version

    async def agree(self, desired: Desired, proved: Sequence[Worker]) -> None:
        """Record that the fleet serves `desired` from now on, on the workers that proved it.
        Followers see both or neither. Raises Unavailable or Superseded when nothing was written."""
        async with self._writing:
            await self._state.store.save(desired, self._all_records(proved, desired.version))

    def view(self) -> LeadershipView:
        """Return which gateway leads. An elected one counts as follower until it took over."""
        view = self._state.leadership.view()
        return view if self._state.leads else msgspec.structs.replace(view, role="follower")

    async def wait_to_lead(self) -> bool:
        """Return whether this gateway leads; wait for the take-over if it was just elected."""
        deadline = monotonic() + TAKE_OVER_SECONDS
        state = self._state
        while state.leadership.leads and not state.leads and monotonic() < deadline:
            await asyncio.sleep(0.02)
        return state.leads

    def check_leads(self) -> None:
        """Raise Unavailable, naming the leader, when this gateway does not lead."""
        if not self._state.leads:
            leader = self.view().leader
            where = f"{leader} does" if leader else "no leader is known yet"
            raise Unavailable(f"this gateway does not lead the fleet, {where}", retry_after=1.0)

    async def read(self) -> None:
        """Apply what the leader has decided by now. Raises Unavailable when the store is away."""
        async with self._reading:
            if not self._state.leads:
                await self._follow(await self._state.store.snapshot())

    # Records of the leader

    def _all_records(
        self, proved: Sequence[Worker] | None = None, version: str | None = None
    ) -> list[WorkerRecord] | None:
        """Return the workers as followers must see them; None for a gateway that is alone. With
        `proved`, exactly those workers serve, under `version`."""
        if not self._state.leadership.shared:
            return None
        self._drop_carried()
        return [*self._carried.values(), *self._own_records(proved, version)]

    def _drop_carried(self) -> None:
        """Drop the earlier leader's records of workers that this gateway has found itself."""
        if monotonic() > self._carried_until:
            self._carried = {}
        for worker in self._state.pool.workers:
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
            for worker in self._state.workers
            if not worker.leaving
        ]

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
            self._membership.tokens.get(worker.id),
            worker.options.get("transport"),
            worker.options.get("logprob_mode"),
            worker.gpus,
        )

    async def _publish(self) -> None:
        async with self._writing:
            records = tuple(self._all_records() or ())
            if records == self._published:
                return
            try:
                await self._state.store.publish(records)
            except Superseded:
                self._news.set()
                return
            self._published = records

    # The role

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._wait_for_news()
            self._news.clear()
            try:
                await self._update_role()
            except LockstepError as error:
                log.warning("this gateway cannot follow its store: %s", error.message)
            except Exception:
                # Keep polling whatever failed: a gateway that stops would serve old versions.
                log.exception("this gateway cannot follow its store")

    async def _wait_for_news(self) -> None:
        """Wait for a change in the store or, on the leader, in the set of serving workers."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._news.wait())]
        if self._state.leads:
            waits.append(asyncio.ensure_future(self._state.pool.wait_for_change()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _update_role(self) -> None:
        leadership = self._state.leadership
        generation = leadership.generation if leadership.leads else 0
        # Not `!=`: a leader raises its own generation when a worker obeys a higher one.
        if self._led_generation and generation < self._led_generation:
            await self._stop_leading("this gateway does not lead any more: send the request again")
        if generation and not self._led_generation:
            await self._start_leading(generation)
        if self._led_generation:
            self._membership.take_in(self._carried)
            await self._publish()
        elif not self._state.leads:
            await self.read()
            self._membership.follow(self._records)

    async def _wait_to_start_over(self) -> None:
        """Wait until this gateway is alone on the store. Raises Conflict when it is not."""
        leadership = self._state.leadership
        deadline = monotonic() + FRESH_SECONDS
        while not leadership.leads:
            if monotonic() > deadline:
                others = ", ".join(gateway.address for gateway in leadership.view().gateways)
                raise Conflict(
                    "--fresh drops the state of the store, which other gateways use "
                    f"({others or 'their addresses are not known yet'}): stop them first, or give "
                    "the store's URL another ?schema=NAME",
                    param="fresh",
                )
            await asyncio.sleep(0.05)

    async def _start_leading(self, generation: int) -> None:
        async with self._reading:
            if self._fresh:
                await self._state.store.save(Desired(generation=generation), ())
                self._fresh = False
            # Read the earlier leader's records before writing any: a worker that this gateway has
            # not found yet would otherwise vanish for all followers.
            await self._follow(await self._state.store.snapshot())
            self._carried = dict(self._records)
            self._carried_until = monotonic() + CARRIED_SECONDS
            self._drop_carried()
            await self._leader.start(generation)
        self._led_generation, self._published = generation, None
        log.info("this gateway leads the fleet as generation %d", generation)

    async def _stop_leading(self, reason: str) -> None:
        self._led_generation, self._revision = 0, -1
        await self._leader.stop(reason)
        self._state.pool.accepted.read_anew = self.read

    async def _follow(self, snapshot: FleetSnapshot) -> None:
        if snapshot.revision == self._revision:
            return
        state, pool = self._state, self._state.pool
        state.adopt(snapshot.desired)
        pool.accepted.follow(snapshot.desired.agreed)
        self._records = {record.id: record for record in snapshot.workers}
        self._revision = snapshot.revision
        for worker in state.workers:
            reason = self._rejection(worker, self._records.get(worker.id))
            if worker.serves and reason is not None:
                pool.eject(worker.id, reason)
            elif worker.serves:
                worker.version = snapshot.desired.version
            elif reason is None and not worker.leaving:
                pool.check(worker.id)

    def _rejection(self, worker: Worker, record: WorkerRecord | None) -> str | None:
        """Return why a follower must not send requests to a worker; None when it may."""
        desired = self._state.desired
        if record is None:
            return "the leader has no record of it: add it there (POST /v1/rl/workers)"
        if record.url != worker.url:
            return f"the leader has another worker of this id, at {record.url}"
        if not record.serving:
            return f"the leader has it {record.state}: {record.reason}"
        if record.version != desired.version:
            return f"it has proved {record.version!r}, not {desired.version!r}"
        return None
