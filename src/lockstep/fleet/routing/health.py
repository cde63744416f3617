"""Probes the workers of a pool: who stops answering is ejected, who is well again is brought up."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

from lockstep.fleet.routing.rendezvous import RendezvousHash
from lockstep.fleet.worker import HEALTH_SECONDS, Worker
from lockstep.tokens.errors import BadRequest, Busy, Conflict, LockstepError, NotFound, Unavailable

log = logging.getLogger(__name__)

PROBES_PER_SECOND = 100.0
"""Over the whole fleet: a large one is probed less often, as requests find failures anyway."""
MOST_FAILURES = 16
GONE_FAILURES = 3
"""Probes in a row without a response, after which nobody waits for a worker any more."""
STUCK_FAILURES = 6
"""Attempts to bring a worker up, after which its requests are taken from it: it may be paused."""
Gate = Callable[[Worker], Awaitable[None]]
"""Brings a healthy worker with a control side to `proving`, proved. Raises what keeps it out."""


class HealthMonitor:
    """The workers by id. Each has a task that probes it: often while it is out, then less.

    It decides who is in the rendezvous hash: exactly the workers that are routable.
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
        """The worker of that id. Raises NotFound."""
        if worker_id not in self.workers:
            known = ", ".join(list(self.workers)[:20]) or "none"
            raise NotFound(f"there is no worker {worker_id!r}; known are {known}", param="worker")
        return self.workers[worker_id]

    async def add(self, worker: Worker) -> None:
        """Takes a worker in, probed once; it may be down. Raises Conflict when its id exists."""
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
        """Gives it no more requests, waits for those it has, and forgets it."""
        worker = self.get(worker_id)
        worker.become("draining", "it is being removed")
        self._leave(worker)
        try:
            if worker.in_flight:
                worker.idle.clear()
                async with asyncio.timeout(drain_seconds):
                    await worker.idle.wait()
        except TimeoutError:
            log.warning("worker %s is removed with %d requests on it", worker_id, worker.in_flight)
        finally:
            if self.workers.pop(worker_id, None) is not None:
                await _stop(self._tasks.pop(worker_id, None))
                await worker.close()

    async def close(self) -> None:
        """Stops probing and closes every connection."""
        tasks, self._tasks = list(self._tasks.values()), {}
        await _stop(*tasks)
        workers, self.workers = list(self.workers.values()), {}
        self._rendezvous.rebuild(())
        for worker in workers:
            await worker.close()

    async def wait(self, count: int, seconds: float) -> None:
        """Returns when `count` workers serve. Raises Unavailable, naming the others, if late."""
        try:
            async with asyncio.timeout(seconds):
                while len(self._rendezvous) < count:
                    await self._changed.wait()
        except TimeoutError:
            others = "; ".join(self.why_out()) or "no others were added"
            raise Unavailable(
                f"{len(self._rendezvous)} of {count} workers serve after {seconds:g} s: {others}"
            ) from None

    async def changed(self) -> None:
        """Returns when other workers are routable than were."""
        await self._changed.wait()

    def why_out(self) -> list[str]:
        """A few of those that do not serve, with the reason."""
        out = [worker for worker in self.workers.values() if not worker.serves]
        return [f"{worker.id} is {worker.state} ({worker.reason})" for worker in out[:5]]

    def request_failed(self, worker: Worker, epoch: int, error: LockstepError) -> None:
        """Ejects a worker on which a request failed.

        `epoch` is what it was when the request began: a failure of before it came back says
        nothing about it now.
        """
        if worker.epoch == epoch:
            self.eject(worker, error.message)

    def eject(
        self, worker: Worker, reason: str, state: Literal["down", "quarantined"] = "down"
    ) -> None:
        """Gives it no more requests until it was brought up again; one that leaves just leaves."""
        if worker.leaving:
            return
        worker.failures = min(worker.failures + 1, MOST_FAILURES)
        # A quarantined worker that cannot be reached either stays so, for the reason it is.
        if (worker.state, state) != ("quarantined", "down"):
            if worker.serves or state == "quarantined":
                log.warning("worker %s is ejected and %s: %s", worker.id, state, reason)
            # While it is brought up it may be ejected as well: what is under way then is void.
            up = worker.state in ("serving", "syncing", "proving")
            worker.become(state, reason)
            if up:
                self._leave(worker)
        self._schedule(worker, self._pause(worker))

    def hold(self, worker: Worker, held: bool) -> None:
        """Keeps new requests from it, or lets them in again, without a change of its state."""
        if worker.held != held:
            worker.held = held
            self._rebuild()

    def check(self, worker: Worker) -> None:
        """Has it probed now: there is a reason to think that it has changed."""
        self._schedule(worker, 0.0)

    async def probe(self, worker: Worker) -> None:
        """Looks at a worker once: ejects it when it is ill, brings it up when it is well again."""
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
            # It, or this process, has too much to do: that says nothing against the worker.
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
            return  # a request failed meanwhile and knows better
        restarted = worker.instance not in (None, health.instance)
        worker.instance = health.instance
        if restarted and worker.serves:
            self.eject(worker, "it was restarted")
            self.check(worker)
            return
        ours = max(sent, worker.in_flight)
        worker.elsewhere = max(0, health.running + health.waiting - ours)
        if worker.serves:
            worker.failures = 0
            self._rendezvous.weigh()
        else:
            # Nothing was awaited since the gate: what it proved is still what the fleet wants.
            worker.become("serving")
            worker.epoch += 1
            # Whoever was told that it is away is told that it is not.
            log.log(
                logging.WARNING if worker.failures else logging.INFO, "worker %s serves", worker.id
            )
            self._rebuild()

    def _call_off(self, worker: Worker, *, gone: bool) -> None:
        """Ends the requests on a worker, so that they are tried elsewhere.

        Where there is no other worker they wait for this one, unless it is `gone`; then those end
        too that have delivered a part.
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
            if worker.next_probe == math.inf:  # else something meanwhile scheduled the next
                self._schedule(worker, self._pause(worker))

    def _schedule(self, worker: Worker, pause: float) -> None:
        worker.next_probe = asyncio.get_running_loop().time() + pause
        worker.wake.set()

    def _pause(self, worker: Worker) -> float:
        """Seconds to the next probe. They vary, or the probes of a fleet would come in step."""
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
        self._rendezvous.rebuild([one for one in self.workers.values() if one.routable])
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
