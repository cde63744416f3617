"""A pool of workers behind one URL: bounded, load-balanced, with retries on other workers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

from lockstep import tracing
from lockstep.backends.admin import Admin
from lockstep.backends.transport import GenerateRequest, ModelCard, TransportName
from lockstep.flags import Flag
from lockstep.fleet.control.accepted_versions import AcceptedVersions
from lockstep.fleet.response_check import ResponseCheck
from lockstep.fleet.routing.admission import AdmissionLimiter
from lockstep.fleet.routing.affinity import Affinity, RendezvousHash
from lockstep.fleet.routing.health import Gate, HealthMonitor
from lockstep.fleet.routing.suspects import MOST_DEATHS, Suspects
from lockstep.fleet.worker import HEALTH_SECONDS, RETRIES, Worker
from lockstep.http.client.client import HttpClient
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import (
    BadRequest,
    ContractError,
    DeadlineExceeded,
    EngineFailure,
    ImpossibleResponse,
    LockstepError,
    Unavailable,
)

if TYPE_CHECKING:
    from lockstep.tracing.tracer import EngineCall

T = TypeVar("T")
traffic_flag = partial(Flag, panel="Traffic")
MODELS_SAMPLE = 16
"""Workers whose models are read at once. In a larger fleet they represent all workers."""
MOST_ENGINE_FAILURES = 2
"""Engines that one request may break. After the second, the request is to blame."""


class Pool:
    """The workers behind one URL.

        async with Pool() as pool:
            await pool.add("http://127.0.0.1:9000")
            affinity = Affinity.of(request.prompt_ids)
            completions = await pool.run(affinity, lambda worker: worker.generate(request))

    Requests of the same affinity go to the same worker while it serves and is not overloaded. At
    most `max_in_flight` requests run at once; `queue_limit` more wait, for up to `queue_seconds`. A
    request whose worker fails before anything was delivered is retried on other workers, at most
    `attempts` times in all. A request on a worker that died is retried once: a request that kills
    workers must not kill the fleet. A worker that
    does not answer its health probe within `health_seconds` has failed, also for the requests that
    it already has.
    """

    def __init__(
        self,
        *,
        max_in_flight: Annotated[int, traffic_flag("Most requests at the workers at once.")] = 1024,
        queue_limit: Annotated[
            int, traffic_flag("Most requests that wait; further requests get status 429.")
        ] = 4096,
        queue_seconds: Annotated[
            float, traffic_flag("Longest wait of a request; then it gets status 503.")
        ] = 60.0,
        load_factor: float = 1.25,
        probe_seconds: float = 1.0,
        health_seconds: Annotated[
            float,
            traffic_flag(
                "Seconds without a response after which a worker is down and its requests are "
                "tried elsewhere."
            ),
        ] = HEALTH_SECONDS,
        attempts: int = 4,
        worker_api_key: str | None = None,
    ) -> None:
        """`worker_api_key` is for workers that are added without a key of their own."""
        if attempts < 1:
            raise BadRequest(f"attempts is {attempts}: expected at least 1", param="attempts")
        self._rendezvous: RendezvousHash[Worker] = RendezvousHash(load_factor)
        self.accepted = AcceptedVersions()
        self.response_check = ResponseCheck()
        self._health = HealthMonitor(self._rendezvous, probe_seconds, health_seconds)
        self._admission = AdmissionLimiter(max_in_flight, queue_limit, queue_seconds)
        self._attempts = attempts
        self._suspects = Suspects()
        self._worker_api_key = worker_api_key
        self._retry_after = probe_seconds

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._admission.close(Unavailable("this server is shutting down: use another one"))
        await self._health.close()

    @property
    def workers(self) -> Sequence[Worker]:
        """All workers, serving or not, in the order they were added."""
        return tuple(self._health.workers.values())

    @property
    def in_flight(self) -> int:
        return self._admission.taken

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    async def add(
        self,
        url: str,
        *,
        worker_id: str | None = None,
        transport: TransportName | None = None,
        api_key: str | None = None,
        logprob_mode: LogprobMode | None = None,
        admin: Admin | None = None,
        gpus: Sequence[str] = (),
    ) -> Worker:
        """Add a worker. Its id defaults to its host and port.

        A worker that cannot be reached is added as down, and serves once it can. `transport` is
        detected by default. `logprob_mode` is needed for servers that do not report it. A worker
        with an `admin` serves once it passed the gate. `gpus` are those it was placed on, for the
        state page. Raises Conflict when the id exists and BadRequest for an invalid URL.
        """
        api_key = api_key or self._worker_api_key
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadRequest(f"worker url is {url!r}: expected http://HOST:PORT", param="url")
        worker = Worker(
            worker_id or parts.netloc,
            url.rstrip("/"),
            HttpClient(url, api_key=api_key, retries=RETRIES),
            {"transport": transport, "api_key": api_key, "logprob_mode": logprob_mode},
            admin,
            self.accepted,
            self.response_check,
            gpus=tuple(gpus),
        )
        await self._health.add(worker)
        return worker

    async def remove(self, worker_id: str, *, drain_seconds: float = 30.0) -> None:
        """Send a worker no new requests, wait up to `drain_seconds`, and drop it. Raises
        NotFound."""
        await self._health.remove(worker_id, drain_seconds)

    def gate(self, gate: Gate) -> None:
        """Set the gate that workers with an admin must pass before they serve. It raises to reject
        one."""
        self._health.gate = gate

    def get(self, worker_id: str) -> Worker:
        """Return a worker by id. Raises NotFound."""
        return self._health.get(worker_id)

    def eject(self, worker_id: str, reason: str) -> None:
        """Send a worker no more requests until it passes the gate again. Raises NotFound."""
        self._health.eject(self.get(worker_id), reason)

    def quarantine(self, worker: Worker, reason: str) -> None:
        """Eject a worker that failed to hold or to prove the desired state."""
        self._health.eject(worker, reason, "quarantined")

    def hold(self, worker: Worker, held: bool) -> None:
        """Withhold new requests from a worker while `held`, whatever its state."""
        self._health.hold(worker, held)

    def next_try(self, worker: Worker) -> float | None:
        """Return the seconds until a worker that is out is probed again; None if it serves or
        leaves."""
        if worker.serves or worker.leaving or worker.next_probe == math.inf:
            return None
        return max(worker.next_probe - asyncio.get_running_loop().time(), 0.0)

    def check(self, worker_id: str) -> None:
        """Probe a worker now, for example because it was restarted. Raises NotFound."""
        self._health.check(self.get(worker_id))

    async def wait_ready(self, count: int, seconds: float) -> None:
        """Wait until `count` workers serve. Raises Unavailable, naming the others, after
        `seconds`."""
        await self._health.wait(count, seconds)

    async def wait_for_change(self) -> None:
        """Wait until the set of workers that get requests changes."""
        await self._health.wait_for_change()

    async def run(
        self,
        affinity: Affinity,
        call: Callable[[Worker], Awaitable[T]],
        request: GenerateRequest | None = None,
    ) -> T:
        """Return the result of `call` on the worker that `affinity` selects.

        `call` raises Unavailable when the worker could not serve the request: the worker is ejected
        until it is healthy, and another is tried. After EngineFailure the worker is probed and one
        other is tried. Any other error is raised as it is. Raises Unavailable when no worker
        serves, and Busy when too many requests wait; both say when to retry. Raises BadRequest for
        a `request` that was alone on two workers when they died.
        """
        self._suspects.check(request)
        self._check_any()
        attempt = _Attempt(self, affinity, request)
        if not self._admission.take_now():
            await self._admission.take()
        try:
            while True:
                with attempt as worker:
                    if attempt.traced is None:
                        return await call(worker)
                    return await attempt.traced.run(call(worker))
        finally:
            self._admission.give()

    async def stream(
        self,
        affinity: Affinity,
        open: Callable[[Worker], AsyncIterator[T]],
        request: GenerateRequest | None = None,
        *,
        deaths: int = 0,
    ) -> AsyncGenerator[T, None]:
        """Yield the items of `open(worker)` for the worker that `affinity` selects.

        Up to the first item, failures are handled as in `run`. After it the request stays on its
        worker and errors are raised: the caller has seen a part of the response. `deaths` counts
        the workers that were lost while they streamed the same request before.
        """
        self._suspects.check(request)
        self._check_any()
        attempt = _Attempt(self, affinity, request, deaths)
        loop = asyncio.get_running_loop()
        if not self._admission.take_now():
            await self._admission.take()
        try:
            while True:
                with attempt as worker:
                    items = open(worker)
                    if attempt.traced is not None:
                        items = attempt.traced.items(items)
                    try:
                        async for item in items:
                            attempt.delivered, attempt.waiting = True, None
                            yield item
                            attempt.waiting = asyncio.current_task(loop)
                    finally:
                        close = getattr(items, "aclose", None)
                        if close is not None:
                            await close()
                    return
        finally:
            self._admission.give()

    async def models(self) -> list[ModelCard]:
        """Return the models that all workers serve, base model first. Raises Unavailable if none
        can tell.

        The weight version is None while the workers differ in it.
        """
        self._check_any()
        serving = [worker for worker in self.workers if worker.serves]
        sample = random.sample(serving, min(len(serving), MODELS_SAMPLE))
        lists = await self._each(sample, lambda worker: worker.transport.models())
        common = {card.id: card for card in lists[0]}
        for cards in lists[1:]:
            others = {card.id: card for card in cards}
            common = {
                name: _common_card(card, others[name])
                for name, card in common.items()
                if name in others
            }
        return sorted(common.values(), key=lambda card: card.parent is not None)

    async def abort(self, *request_ids: str) -> int | None:
        """Abort requests by id, on whichever worker they run.

        Return how many were stopped, or None if no worker reports it, as vLLM's do not.
        """
        self._check_any()
        workers = [worker for worker in self.workers if worker.serves or worker.leaving]
        counts = await self._each(workers, lambda worker: worker.abort(*request_ids))
        reported = [count for count in counts if count is not None]
        return sum(reported) if reported else None

    async def _each(
        self, workers: Sequence[Worker], call: Callable[[Worker], Awaitable[T]]
    ) -> list[T]:
        """Call the given workers at once, and return the results of those that respond. Raises
        Unavailable when none does, and any other error."""
        epochs = [worker.epoch for worker in workers]
        outcomes = await asyncio.gather(*map(call, workers), return_exceptions=True)
        results: list[T] = []
        for worker, epoch, outcome in zip(workers, epochs, outcomes, strict=True):
            if isinstance(outcome, Unavailable):
                self._health.request_failed(worker, epoch, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results.append(outcome)
        if not results:
            raise self._no_worker()
        return results

    def _check_any(self) -> None:
        if not len(self._rendezvous):
            raise self._no_worker()

    def _no_worker(self) -> Unavailable:
        reasons = "; ".join(self._health.why_out()) or "none was added"
        for worker in self.workers:
            reasons = reasons.replace(worker.url, f"worker {worker.id}")
        return Unavailable(f"no worker serves: {reasons}", retry_after=self._retry_after)


class _Attempt:
    """One request on its way through workers.

    Entering it picks a worker. Leaving it with a failure that another worker may avoid swallows the
    failure, so that the caller enters again.
    """

    __slots__ = (
        "_affinity", "_called_off", "_deaths", "_engine_failures", "_epoch", "_pool", "_request",
        "_since", "_tried", "_worker", "begun", "delivered", "mark", "traced", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        pool: Pool,
        affinity: Affinity,
        request: GenerateRequest | None = None,
        deaths: int = 0,
    ) -> None:
        self._pool = pool
        self._affinity = affinity
        self._request = request
        self._deaths = deaths
        self._tried: list[Worker] = []
        self._engine_failures = 0
        self.delivered = False
        self.waiting: asyncio.Task[Any] | None = None
        """The task that waits for the worker now; None while it waits for the reader of a
        stream."""
        self.traced: EngineCall | None = None
        self._since = 0 if tracing.active is None else tracing.active.now()

    def __enter__(self) -> Worker:
        pool, pinned = self._pool, self._affinity.worker
        if pinned is None:
            picked = pool._rendezvous.pick(self._affinity.key, self._tried)
            if picked is None:
                raise pool._no_worker()
            worker = picked
        else:
            worker = pool.get(pinned)
            if not worker.routable:
                state = "held back until it has proved its weights" if worker.held else worker.state
                raise Unavailable(
                    f"the request names worker {pinned!r}, which is {state} ({worker.reason}): "
                    "name no worker, or try again later",
                    param="worker",
                    retry_after=pool._retry_after,
                )
        self._worker, self._epoch = worker, worker.epoch
        self.waiting, self._called_off = asyncio.current_task(), False
        self.begun, self.mark = monotonic(), worker.accepted.mark()
        worker.attempts.add(self)  # so that `HealthMonitor` can call it off
        pool._rendezvous.begin(worker)
        if (tracer := tracing.active) is not None:
            self.traced = tracer.routed(self._since, worker.id, worker.url, len(self._tried))
        return worker

    @property
    def session(self) -> str | None:
        """The session of the request, if any."""
        return self._affinity.session

    def call_off(self, *, delivered_too: bool) -> None:
        """End the attempt as if its worker had failed. Does nothing when it is not waiting, or when
        a part was delivered unless `delivered_too`."""
        if self.waiting is not None and (delivered_too or not self.delivered):
            self._called_off = True
            self._worker.attempts.discard(self)
            self.waiting.cancel()

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> bool:
        pool, worker = self._pool, self._worker
        worker.attempts.discard(self)
        pool._rendezvous.end(worker)
        if isinstance(error, LockstepError):
            # Callers may be tenants, who have no business with addresses; the state has them.
            error.message = error.message.replace(worker.url, f"worker {worker.id}")
        if self._called_off and self.waiting is not None:
            # Take back the cancellation of `call_off`. If any is left, the caller cancelled the
            # request as well, and must see CancelledError instead of a retry.
            others = self.waiting.uncancel()
            if isinstance(error, asyncio.CancelledError) and not others:
                error = Unavailable(f"worker {worker.id} does not respond: {worker.reason}")
        if worker.leaving and not worker.in_flight:
            worker.idle.set()
        if self.traced is not None and tracing.active is not None:
            self.traced.end(error)
            self._since = tracing.active.now()  # the start of the next attempt, if there is one
        if error is None:
            worker.failures = 0
        elif isinstance(error, Unavailable):
            if error.lost:
                self._count_death()
            pool._health.request_failed(worker, self._epoch, error)
            retries = self._retries(error)
            if self._called_off and not retries:
                raise error from None
            return retries
        elif isinstance(error, EngineFailure):
            pool._health.check(worker)
            self._engine_failures += 1
            blameless = self._engine_failures < MOST_ENGINE_FAILURES
            return blameless and not self.delivered and self._another()
        elif isinstance(error, ImpossibleResponse):
            # Not retried: the caller learns which worker is at fault, and its operator as well.
            worker.impossible += 1
            pool._health.request_failed(worker, self._epoch, error)
        elif isinstance(error, ContractError):
            raise error.with_message(f"worker {worker.id}: {error.message}") from error
        elif isinstance(error, DeadlineExceeded):
            # No other worker is tried: it may be the request that takes this long.
            pool._health.check(worker)
        return False

    def _retries(self, error: Unavailable) -> bool:
        pool = self._pool
        if error.retry_after is None:
            error.retry_after = pool._retry_after
        if self.delivered:
            raise Unavailable(
                f"worker {self._worker.id} failed after a part of the response was delivered, "
                f"so it is not tried elsewhere: {error.message}",
                retry_after=error.retry_after,
            ) from error
        return self._another()

    def _count_death(self) -> None:
        """Count a worker that died with this request on it, and suspect a request that was
        alone."""
        worker = self._worker
        self._deaths += 1
        # If a worker dies with several requests, the last to get here sees no others on it: the
        # mark of the first one tells that it was not alone.
        first = worker.died_in != self._epoch
        worker.died_in = self._epoch
        if first and not worker.in_flight and not worker.elsewhere:
            self._pool._suspects.add(self._request)

    def _another(self) -> bool:
        """Return whether another worker may be tried, and there is one."""
        pool = self._pool
        self._tried.append(self._worker)
        if self._affinity.worker is not None or len(self._tried) >= pool._attempts:
            return False
        if self._deaths >= MOST_DEATHS:
            return False
        return pool._rendezvous.pick(self._affinity.key, self._tried) is not None


def _common_card(card: ModelCard, other: ModelCard) -> ModelCard:
    lengths = [c.max_model_len for c in (card, other) if c.max_model_len is not None]
    same = card.weight_version == other.weight_version
    plans = card.numerics, other.numerics
    return replace(
        card,
        max_model_len=min(lengths, default=None),
        weight_version=card.weight_version if same else None,
        numerics=plans[0].joined(plans[1]) if plans[0] and plans[1] else None,
    )
