"""Health probes of the workers of a pool: failed workers are ejected, recovered ones brought up."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

from lockstep.fleet.routing.affinity import RendezvousHash
from lockstep.fleet.worker import HEALTH_SECONDS, Worker
from lockstep.tokens.errors import BadRequest, Busy, Conflict, LockstepError, NotFound, Unavailable

log = logging.getLogger(__name__)

PROBES_PER_SECOND = 100.0
"""Probe rate over the whole fleet. Large fleets probe less often: requests find failures anyway."""
MOST_FAILURES = 16
GONE_FAILURES = 3
"""Failed probes in a row, after which requests no longer wait for a worker."""
STUCK_FAILURES = 6
"""Failed attempts to bring a worker up, after which its requests are moved: it may be paused."""
Gate = Callable[[Worker], Awaitable[None]]
"""Brings a healthy worker with a control side to `proving`, proved. Raises when it cannot."""


class HealthMonitor:
    """Workers by id, with a probe task each. A worker that is out is probed often, then less.

    It keeps exactly the routable workers in the rendezvous hash.
    """

    def __init__(
        self,
        rendezvous: RendezvousHash[Worker],
        probe_seconds: float,
        health_seconds: float = HEALTH_SECONDS,
    ) -> None:
        for name, value in (("probe_seconds", probe_seconds), ("health_seconds", health_seconds)):
            if not value > 0:
                raise BadRequest(f"{name} is {value}: expected seconds > 0", param=name)
        self._rendezvous = rendezvous
        self._seconds = probe_seconds
        self._health_seconds = health_seconds
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self.workers: dict[str, Worker] = {}
        self.gate: Gate | None = None

    def get(self, worker_id: str) -> Worker:
        """Return a worker by id. Raises NotFound."""
        if worker_id not in self.workers:
            ids = ", ".join(list(self.workers)[:20]) or "none"
            raise NotFound(f"there is no worker {worker_id!r}; there are {ids}", param="worker")
        return self.workers[worker_id]

    async def add(self, worker: Worker) -> None:
        """Add a worker and probe it once; it may be down. Raises Conflict when its id exists."""
        name = worker.id
        if name in self.workers:
            raise Conflict(
                f"there is a worker {name!r} already, at {self.workers[name].url}: remove it "
                "first, or give this one another id",
                param="id",
            )
        self.workers[name] = worker
        try:
            await self.probe(worker)
        except BaseException:
            self.workers.pop(name, None)
            self._leave(worker)
            await worker.close()
            raise
        if self.workers.get(name) is not worker:
            await worker.close()
            raise Conflict(f"worker {name!r} was removed while it joined")
        task = asyncio.create_task(self._watch(worker), name=f"probe {name}")
        task.add_done_callback(_log_crash)
        self._tasks[name] = task

    async def remove(self, worker_id: str, drain_seconds: float) -> None:
        """Send a worker no more requests, wait for those it has, and drop it."""
        worker = self.get(worker_id)
        worker.become("draining", "it is being removed")
        self._leave(worker)
        try:
            if worker.in_flight:
                worker.idle.clear()
                async with asyncio.timeout(drain_seconds):
                    await worker.idle.wait()
        except TimeoutError:
            log.warning("removing worker %s with %d requests on it", worker_id, worker.in_flight)
        finally:
            if self.workers.pop(worker_id, None) is not None:
                await _stop(self._tasks.pop(worker_id, None))
                await worker.close()

    async def close(self) -> None:
        """Stop probing and close every connection."""
        tasks, self._tasks = list(self._tasks.values()), {}
        await _stop(*tasks)
        workers, self.workers = list(self.workers.values()), {}
        self._rendezvous.rebuild(())
        for worker in workers:
            await worker.close()

    async def wait(self, count: int, seconds: float) -> None:
        """Wait until `count` workers serve. Raises Unavailable, naming the others, after
        `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while len(self._rendezvous) < count:
                    await self._changed.wait()
        except TimeoutError:
            others = "; ".join(self.why_out()) or "no others were added"
            raise Unavailable(
                f"{len(self._rendezvous)} of {count} workers serve after {seconds:g} s: {others}"
            ) from None

    async def wait_for_change(self) -> None:
        """Wait until the set of routable workers changes."""
        await self._changed.wait()

    def why_out(self) -> list[str]:
        """Return up to five workers that do not serve, with their reasons."""
        out = [worker for worker in self.workers.values() if not worker.serves]
        return [f"{worker.id} is {worker.state} ({worker.reason})" for worker in out[:5]]

    def request_failed(self, worker: Worker, epoch: int, error: LockstepError) -> None:
        """Eject a worker on which a request failed. `epoch` is the worker's when the request began.
        A failure from before the worker was brought up again says nothing about it now."""
        if worker.epoch == epoch:
            self.eject(worker, error.message)

    def eject(
        self, worker: Worker, reason: str, state: Literal["down", "quarantined"] = "down"
    ) -> None:
        """Send a worker no more requests until it was brought up again. A leaving worker just
        leaves."""
        if worker.leaving:
            return
        worker.failures = min(worker.failures + 1, MOST_FAILURES)
        # A quarantined worker that cannot be reached stays quarantined, with its first reason.
        if (worker.state, state) != ("quarantined", "down"):
            if worker.serves or state == "quarantined":
                log.warning("worker %s ejected (%s): %s", worker.id, state, reason)
            # A worker that is being brought up may be ejected as well. Its new epoch makes the
            # probe that is bringing it up discard its result.
            was_up = worker.state in ("serving", "syncing", "proving")
            worker.become(state, reason)
            if was_up:
                self._leave(worker)
        self._schedule(worker, self._pause(worker))

    def hold(self, worker: Worker, held: bool) -> None:
        """Withhold new requests from a worker, or admit them again, without changing its state."""
        if worker.held != held:
            worker.held = held
            self._rebuild()

    def check(self, worker: Worker) -> None:
        """Probe a worker now, because it may have changed."""
        self._schedule(worker, 0.0)

    async def probe(self, worker: Worker) -> None:
        """Probe a worker once: eject it when it fails, bring it up when it has recovered."""
        # Requests keep failing or finishing on the worker while it is probed. The epoch shows
        # whether it was ejected meanwhile; then this probe's result is out of date.
        epoch, sent = worker.epoch, worker.in_flight
        responded = False
        try:
            health = await worker.health(self._health_seconds)
            responded = True
            if not worker.serves and not worker.leaving:
                await worker.open()
                if worker.admin is None:
                    worker.become("syncing", worker.reason)
                    worker.become("proving", worker.reason)
                elif self.gate is not None:
                    await self.gate(worker)
        except Busy as error:
            # The worker or this process is overloaded, which is no fault of the worker.
            log.warning("worker %s could not be probed: %s", worker.id, error.message)
            return
        except LockstepError as error:
            if worker.epoch == epoch:
                self.eject(worker, error.message)
            if not responded:
                self._call_off(worker, gone=worker.failures >= GONE_FAILURES)
            elif worker.failures >= STUCK_FAILURES:
                self._call_off(worker, gone=False)
            return
        if worker.epoch != epoch:
            return  # a request failed during the probe, which is the newer evidence
        restarted = worker.instance not in (None, health.instance)
        worker.instance = health.instance
        if restarted and worker.serves:
            self.eject(worker, "it was restarted")
            self.check(worker)
            return
        # Requests of this process may have begun or ended since the worker counted: subtract the
        # larger number, so that its own load is never taken for that of other gateways.
        ours = max(sent, worker.in_flight)
        worker.elsewhere = max(0, health.running + health.waiting - ours)
        if worker.serves:
            worker.failures = 0
            self._rendezvous.weigh()
        else:
            # Nothing was awaited since the gate returned, so the state that the worker proved is
            # still the desired one. An await here could let an update decide another.
            worker.become("serving")
            worker.epoch += 1
            # At the level of the warning that it was ejected, so that both are seen.
            log.log(
                logging.WARNING if worker.failures else logging.INFO, "worker %s serves", worker.id
            )
            self._rebuild()

    def _call_off(self, worker: Worker, *, gone: bool) -> None:
        """Cancel the requests on a worker, so that they are retried elsewhere.

        Without another worker they keep waiting for this one, unless it is `gone`. Then requests
        that have delivered a part end as well.
        """
        if gone or len(self._rendezvous):
            for attempt in tuple(worker.attempts):
                attempt.call_off(delivered_too=gone)

    async def _watch(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        self._schedule(worker, self._pause(worker))
        while True:
            worker.wake.clear()
            if (rest := worker.next_probe - loop.time()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await worker.wake.wait()
                continue
            worker.next_probe = math.inf
            await self.probe(worker)
            if worker.next_probe == math.inf:  # otherwise the next one was scheduled meanwhile
                self._schedule(worker, self._pause(worker))

    def _schedule(self, worker: Worker, pause: float) -> None:
        worker.next_probe = asyncio.get_running_loop().time() + pause
        worker.wake.set()

    def _pause(self, worker: Worker) -> float:
        """Return the seconds to the next probe. They vary, so that a fleet's probes are spread
        out."""
        if worker.serves:
            pause = max(self._seconds, len(self.workers) / PROBES_PER_SECOND)
        else:
            pause = self._seconds * min(4.0, 2.0 ** (worker.failures - 4))
        return pause * random.uniform(0.8, 1.2)

    def _leave(self, worker: Worker) -> None:
        worker.epoch += 1
        if worker.hash_index >= 0:
            self._rebuild()

    def _rebuild(self) -> None:
        self._rendezvous.rebuild([w for w in self.workers.values() if w.routable])
        self._changed.set()
        self._changed = asyncio.Event()


async def _stop(*tasks: asyncio.Task[None] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended", task.get_name(), exc_info=error)
