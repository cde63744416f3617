"""Which workers there are and which of them serve: they are probed, left out, and taken back."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from lockstep.backends import GenerateRequest, StreamDelta, Transport, TransportName, open_transport
from lockstep.fleet.control.accepted_versions import AcceptedVersions
from lockstep.fleet.routing.rendezvous import RendezvousHash
from lockstep.http.client import HttpClient
from lockstep.tokens import Completion, LogprobMode
from lockstep.tokens.errors import BadRequest, Busy, Conflict, LockstepError, NotFound, Unavailable

log = logging.getLogger(__name__)

PROBE_TIMEOUT = 10.0
PROBES_PER_SECOND = 100.0
"""Over the whole fleet: a large one is probed less often, as requests find failures anyway."""
RETRIES = 1
"""On the same worker: enough for a connection it had dropped; more only delays the next worker."""

State = Literal["serving", "down", "draining"]
Gate = Callable[["Worker"], Awaitable[None]]
"""Called for a worker that is healthy again, before it serves. Raises what keeps it out."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker as the gateway sees it. Only Members changes its state.

    `elsewhere` is the load that others gave it, as of the last probe; `error` says why it is down.
    """

    id: str
    url: str
    link: HttpClient
    options: dict[str, Any] = field(default_factory=dict)
    state: State = "down"
    in_flight: int = 0
    elsewhere: int = 0
    held: bool = False
    error: str | None = "not probed yet"
    place: int = -1
    strikes: int = 0
    changes: int = 0
    due: float = 0.0
    opened: Transport | None = None
    agreement: AcceptedVersions = field(default_factory=AcceptedVersions)
    instance: str | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def transport(self) -> Transport:
        """How to talk to it. Raises Unavailable before it was reached for the first time."""
        if self.opened is None:
            raise Unavailable(f"worker {self.id} has not been reached yet: {self.error}")
        return self.opened

    async def generate(self, ask: GenerateRequest) -> list[Completion]:
        """The completions, under a version the fleet agreed on. Raises Unavailable if not."""
        since = self.agreement.mark()
        done = await self.transport.generate(ask)
        self.agreement.check(done, since, self.id)
        return done

    async def stream(self, ask: GenerateRequest) -> AsyncGenerator[StreamDelta | Completion, None]:
        """Deltas, then completions; an answer under a version not agreed on ends in an error."""
        since = self.agreement.mark()
        async with aclosing(self.transport.stream(ask)) as items:
            async for item in items:
                if isinstance(item, Completion):
                    self.agreement.check((item,), since, self.id)
                yield item

    async def meet(self) -> None:
        """Finds out what it is. A worker that comes back may be another one than it was."""
        if self.opened is None:
            self.opened = await open_transport(self.url, retries=RETRIES, **self.options)
        if not await self.opened.models():
            raise Unavailable(f"{self.url} serves no model yet")

    async def close(self) -> None:
        await self.link.close()
        if self.opened is not None:
            await self.opened.close()


class _Health(msgspec.Struct):
    """`instance` is another one after every start: a restart between two probes shows in it."""

    running: int = 0
    waiting: int = 0
    instance: str | None = None


class Members:
    """The workers by id. Each has a task that probes it: often while it is down, then less."""

    def __init__(
        self, ring: RendezvousHash[Worker], probe_seconds: float, agreement: AcceptedVersions
    ) -> None:
        if not probe_seconds > 0:
            raise BadRequest(
                f"probe_seconds is {probe_seconds}: expected seconds > 0", param="probe_seconds"
            )
        self._ring = ring
        self._agreement = agreement
        self._seconds = probe_seconds
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

    async def add(
        self,
        url: str,
        *,
        worker_id: str | None,
        transport: TransportName | None,
        api_key: str | None,
        logprob_mode: LogprobMode | None,
    ) -> Worker:
        """Takes a worker in, probed once; it may be down. Raises Conflict when the id exists."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"worker url is {url!r}: expected http://HOST:PORT", param="url")
        name = worker_id or parts.netloc
        if name in self.workers:
            raise Conflict(
                f"there is a worker {name!r} already, at {self.workers[name].url}: remove it "
                "first, or give this one another id",
                param="worker_id",
            )
        worker = Worker(
            name,
            url.rstrip("/"),
            HttpClient(url, api_key=api_key, retries=RETRIES),
            {"transport": transport, "api_key": api_key, "logprob_mode": logprob_mode},
            agreement=self._agreement,
        )
        self.workers[name] = worker
        try:
            await self._probe(worker)
        except BaseException:
            self.workers.pop(name, None)
            self._leave(worker)
            await worker.close()
            raise
        if self.workers.get(name) is not worker:
            await worker.close()
            raise Conflict(f"worker {name!r} was removed while it joined")
        task = asyncio.create_task(self._watch(worker), name=f"probe {name}")
        task.add_done_callback(_tell_crash)
        self._tasks[name] = task
        return worker

    async def remove(self, worker_id: str, drain_seconds: float) -> None:
        """Gives it no more requests, waits for those it has, and forgets it."""
        worker = self.get(worker_id)
        worker.state, worker.error = "draining", "it is being removed"
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
        self._ring.rebuild(())
        for worker in workers:
            await worker.close()

    async def wait(self, count: int, seconds: float) -> None:
        """Returns when `count` workers serve. Raises Unavailable, naming the others, if late."""
        try:
            async with asyncio.timeout(seconds):
                while len(self._ring) < count:
                    await self._changed.wait()
        except TimeoutError:
            others = "; ".join(self.why_down()) or "no others were added"
            raise Unavailable(
                f"{len(self._ring)} of {count} workers serve after {seconds:g} s: {others}"
            ) from None

    def why_down(self) -> list[str]:
        """A few of those that do not serve, with the reason."""
        out = [one for one in self.workers.values() if one.state != "serving"]
        return [f"{one.id} is {one.state} ({one.error})" for one in out[:5]]

    def failed(self, worker: Worker, changes: int, error: LockstepError) -> None:
        """Leaves out a worker on which a request failed.

        `changes` is what it was when the request began: a failure of before it came back says
        nothing about it now.
        """
        if worker.changes == changes:
            self._down(worker, error.message)

    def leave_out(self, worker: Worker, reason: str) -> None:
        """Gives it nothing more until it passes the gate again."""
        self._down(worker, reason)

    def hold(self, worker: Worker, held: bool) -> None:
        """Keeps it out of the ring, or lets it in again, without a change of its state."""
        if worker.held != held:
            worker.held = held
            self._rebuild()

    def check(self, worker: Worker) -> None:
        """Has it probed now: there is a reason to think that it has changed."""
        self._plan(worker, 0.0)

    async def _watch(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        self._plan(worker, self._pause(worker))
        while True:
            worker.wake.clear()
            if (rest := worker.due - loop.time()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(rest):
                        await worker.wake.wait()
                continue
            worker.due = math.inf
            await self._probe(worker)
            if worker.due == math.inf:  # else something happened meanwhile that planned the next
                self._plan(worker, self._pause(worker))

    def _plan(self, worker: Worker, pause: float) -> None:
        worker.due = asyncio.get_running_loop().time() + pause
        worker.wake.set()

    def _pause(self, worker: Worker) -> float:
        """Seconds to the next probe. They vary, or the probes of a fleet would come in step."""
        if worker.state == "down":
            pause = self._seconds * min(4.0, 2.0 ** (worker.strikes - 4))
        else:
            pause = max(self._seconds, len(self.workers) / PROBES_PER_SECOND)
        return pause * random.uniform(0.8, 1.2)

    async def _probe(self, worker: Worker) -> None:
        changes, sent = worker.changes, worker.in_flight
        try:
            body = await worker.link.get("/health", timeout=PROBE_TIMEOUT)
            if worker.state == "down":
                await worker.meet()
                if self.gate is not None:
                    await self.gate(worker)
        except Busy as error:
            # It, or this process, has too much to do: that says nothing against the worker.
            log.warning("worker %s was not asked how it is: %s", worker.id, error.message)
            return
        except LockstepError as error:
            if worker.changes == changes:
                self._down(worker, error.message)
            return
        if worker.changes != changes:
            return  # a request failed meanwhile and knows better
        health = _read_health(body)
        restarted = worker.instance not in (None, health.instance)
        worker.instance = health.instance
        if restarted and worker.state == "serving":
            self._down(worker, "it was restarted")
            self.check(worker)
            return
        ours = max(sent, worker.in_flight)
        worker.elsewhere = max(0, health.running + health.waiting - ours)
        if worker.state == "serving":
            worker.strikes = 0
            self._ring.weigh()
        elif worker.state == "down":
            self._up(worker)

    def _up(self, worker: Worker) -> None:
        log.info("worker %s serves", worker.id)
        worker.state, worker.error = "serving", None
        worker.changes += 1
        self._rebuild()

    def _down(self, worker: Worker, reason: str) -> None:
        if worker.state == "draining":
            return
        worker.error = reason
        worker.strikes = min(worker.strikes + 1, 16)
        if worker.state == "serving":
            log.warning("worker %s is left out: %s", worker.id, reason)
            worker.state = "down"
            self._leave(worker)
        self._plan(worker, self._pause(worker))

    def _leave(self, worker: Worker) -> None:
        worker.changes += 1
        if worker.place >= 0:
            self._rebuild()

    def _rebuild(self) -> None:
        self._ring.rebuild(
            [one for one in self.workers.values() if one.state == "serving" and not one.held]
        )
        self._changed.set()
        self._changed = asyncio.Event()


def _read_health(body: bytes | bytearray) -> _Health:
    """What a worker says of itself; nothing where it does not tell."""
    try:
        return msgspec.json.decode(body, type=_Health)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Health()


async def _stop(*tasks: asyncio.Task[None] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _tell_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended", task.get_name(), exc_info=error)
