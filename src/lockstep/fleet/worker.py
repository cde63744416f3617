"""One worker of a fleet: how it is reached and controlled, and the states it can be in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from time import time
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from lockstep import tracing
from lockstep.backends.admin import AbortsRequests, Admin
from lockstep.backends.dynamo.transport import DynamoTransport
from lockstep.backends.registry import ENGINES, engine_of, open_transport
from lockstep.backends.transport import GenerateRequest, StreamDelta, Transport
from lockstep.fleet.control.accepted_versions import AcceptedVersions
from lockstep.fleet.response_check import ResponseCheck
from lockstep.http.client.client import HttpClient
from lockstep.storage.desired_state import Closeness
from lockstep.tokens import Completion
from lockstep.tokens.errors import Conflict, Unavailable
from lockstep.tokens.operation import Evidence

HEALTH_SECONDS = 10.0
RETRIES = 1
"""On the same worker: enough for a connection that it had dropped. More only delays the next
worker."""

State = Literal["joining", "down", "syncing", "proving", "serving", "draining", "quarantined"]

TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        "joining": frozenset({"down", "syncing", "draining"}),
        "down": frozenset({"syncing", "quarantined", "draining"}),
        "syncing": frozenset({"proving", "down", "quarantined", "draining"}),
        "proving": frozenset({"serving", "syncing", "down", "quarantined", "draining"}),
        "serving": frozenset({"down", "quarantined", "draining"}),
        "quarantined": frozenset({"syncing", "draining"}),
        "draining": frozenset(),
    }
)
"""Allowed next states. Only `proving` leads to `serving`: no worker serves unproved weights.

joining: added, not reached yet. down: unreachable, or a request failed on it. syncing: it is given
the fleet's weights and adapters. proving: it proves that it holds them. quarantined: it failed to
hold or to prove the desired state. draining: it is being removed, for good. A worker without a
control side passes syncing and proving once it is healthy and has a model: it cannot prove more.
"""


class WorkerHealth(msgspec.Struct):
    """The health that a worker reports. `instance` changes whenever its process is restarted."""

    running: int = 0
    waiting: int = 0
    instance: str | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """A worker and its state, which only `become` changes.

    `admin` is its control side; without one it only serves requests. `reason` says why it does not
    serve, `since` (Unix time) when it entered its state, `version` what it last proved to hold,
    `closeness` how closely it then followed the trainer. `in_flight` counts the requests that this
    process sent it, `elsewhere` is its load from other gateways as of the last probe. While it is
    `held` it gets no new requests, whatever its state. `epoch` changes whenever earlier
    observations of it no longer count; `died_in` is the last one in which it died with requests.
    `attempts` are the requests on it that can be called off. `sampled` counts its tokens,
    `impossible` its responses that no engine can return; `evidence` is the ground of the last
    accept or reject, and `judged` its time. `gpus` are those it was placed on by the command that
    started it.
    """

    id: str
    url: str
    client: HttpClient
    options: dict[str, Any] = field(default_factory=dict)
    admin: Admin | None = None
    accepted: AcceptedVersions = field(default_factory=AcceptedVersions)
    response_check: ResponseCheck = field(default_factory=ResponseCheck)
    _state: State = field(default="joining", init=False)
    reason: str | None = "not probed yet"
    since: float = field(default_factory=time)
    version: str | None = None
    closeness: Closeness | None = None
    in_flight: int = 0
    elsewhere: int = 0
    held: bool = False
    hash_index: int = -1
    failures: int = 0
    epoch: int = 0
    died_in: int = -1
    next_probe: float = 0.0
    opened: Transport | None = None
    instance: str | None = None
    attempts: set[Any] = field(default_factory=set)
    sampled: int = 0
    impossible: int = 0
    evidence: Evidence | None = None
    judged: float | None = None
    gpus: tuple[str, ...] = ()
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> State:
        return self._state

    @property
    def serves(self) -> bool:
        return self._state == "serving"

    @property
    def routable(self) -> bool:
        """Whether new requests may be sent to it."""
        return self._state == "serving" and not self.held

    @property
    def leaving(self) -> bool:
        return self._state == "draining"

    def become(self, state: State, reason: str | None = None) -> None:
        """Change the state and its reason. Raises Conflict for a change that TRANSITIONS does not
        allow. Staying in a state is allowed."""
        if state != self._state:
            if state not in TRANSITIONS[self._state]:
                allowed = ", ".join(sorted(TRANSITIONS[self._state])) or "nothing else"
                raise Conflict(
                    f"worker {self.id} is {self._state} and cannot become {state}, only {allowed}"
                )
            self._state, self.since = state, time()
        self.reason = reason

    def judge(self, evidence: Evidence) -> None:
        """Record the evidence for the last accept or reject, for the state page."""
        self.evidence, self.judged = evidence, time()

    @property
    def transport(self) -> Transport:
        """Its data side. Raises Unavailable before it was reached for the first time."""
        if self.opened is None:
            raise Unavailable(f"worker {self.id} has not been reached yet: {self.reason}")
        return self.opened

    @property
    def control(self) -> Admin:
        """Its control side. Raises Conflict when it was added without one."""
        if self.admin is None:
            raise Conflict(f"worker {self.id} has no control side: add it with its admin URL")
        return self.admin

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return the completions. Raises Unavailable when the fleet has not accepted their
        version."""
        since = self.accepted.mark()
        if (tracer := tracing.active) is not None:
            tracer.generation(request.model, request.sampling)
        completions = await self.transport.generate(request)
        self.response_check.check(request, completions, self.id)
        await self.accepted.confirm(completions, since, self.id)
        if tracer is not None:
            tracer.generated(completions)
        self.sampled += sum(len(completion.token_ids) for completion in completions)
        return completions

    async def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamDelta | Completion, None]:
        """Yield deltas, then completions. Raises Unavailable as `generate` does, after the
        deltas."""
        since = self.accepted.mark()
        completions: list[Completion] = []
        generated: Counter[int] = Counter()
        if (tracer := tracing.active) is not None:
            tracer.generation(request.model, request.sampling)
        async with aclosing(self.transport.stream(request)) as items:
            async for item in items:
                if isinstance(item, Completion):
                    self.response_check.check(request, (item,), self.id)
                    await self.accepted.confirm((item,), since, self.id)
                    if tracer is not None:
                        completions.append(item)
                        tracer.generated(completions)
                else:
                    self.sampled += len(item.token_ids)
                    generated[item.index] += len(item.token_ids)
                    count = generated[item.index]
                    self.response_check.check_tokens(
                        request, item.index, item.token_ids, item.logprobs, count, self.id
                    )
                yield item

    async def abort(self, *request_ids: str) -> int | None:
        """Abort requests by id; return how many were running, or None if that is not reported."""
        transport = self.transport
        if isinstance(transport, DynamoTransport) and isinstance(self.admin, AbortsRequests):
            return await self.admin.abort(*transport.sent_ids(*request_ids))
        return await transport.abort(*request_ids)

    async def health(self, seconds: float = HEALTH_SECONDS) -> WorkerHealth:
        """Return the reported health; the default values where it reports nothing. Raises
        Unavailable when it is unhealthy and DeadlineExceeded when it does not respond in time."""
        body = await self.client.get(self._health_route, timeout=seconds)
        try:
            return msgspec.json.decode(body, type=WorkerHealth)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return WorkerHealth()

    @property
    def _health_route(self) -> str:
        if self.admin is not None:
            return ENGINES[self.admin.name].health_route
        if self.opened is not None:
            return engine_of(self.opened.name).health_route
        return "/health"

    async def open(self) -> None:
        """Detect its dialect and read its models. Raises Unavailable when it serves no model
        yet."""
        if self.opened is None:
            self.opened = await open_transport(self.url, retries=RETRIES, **self.options)
        # Read each time: a worker that comes back may serve other models than before.
        if not await self.opened.models():
            raise Unavailable(f"{self.url} serves no model yet")

    async def close(self) -> None:
        await self.client.close()
        if self.opened is not None:
            await self.opened.close()
