"""The first requests of a group's rollouts, merged into one request where only their seeds differ.

The rollouts of a group start with the same prompt. One request with a choice for each costs one
round trip and one prefill. Choice i of a request is sampled with its seed plus i, and the rollouts
of a group have consecutive seeds, so each gets the tokens that its own request would have returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

from lockstep.backends.transport import CompletionStream, Relay, Transport, TransportName
from lockstep.client.openings import Openings
from lockstep.protocol.common.model_card import ModelCard
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import ContractError, LockstepError
from lockstep.train.learning.batch import RolloutDraw

GRACE_SECONDS = 0.02
"""How long the first request of a group waits for the others."""
EVIDENCE_TOKENS = 256
"""Sampled tokens after which `SiblingWaits.too_long` is decided."""
MAX_WAITED = 0.25
"""Maximum share of the sampled tokens for which finished rollouts may wait for their siblings."""
_REQUEST = tuple(own.name for own in fields(GenerateRequest) if own.name != "sampling")
_SAMPLING = tuple(own.name for own in fields(Sampling) if own.name != "seed")


@dataclass(slots=True)
class SiblingWaits:
    """How many tokens rollouts have waited for their siblings before their next turn.

    A response arrives when its longest choice has ended. That costs nothing in a single-turn task,
    but delays the next turn of a conversation: then separate requests are faster.
    """

    sampled: int = 0
    waited: int = 0

    @property
    def too_long(self) -> bool:
        """Whether separate requests are better."""
        return self.sampled > EVIDENCE_TOKENS and self.waited > MAX_WAITED * self.sampled


@dataclass(slots=True, eq=False)
class _Queued:
    """A request that is not sent yet, and the future of its completion."""

    request: GenerateRequest
    completion: asyncio.Future[tuple[Completion, int]]


class GroupRequests:
    """Merges the first requests of the `size` rollouts of one group.

    One request has at most `max_choices` choices, so that a group is spread over several workers.
    """

    def __init__(
        self, transport: Transport, waits: SiblingWaits, *, size: int, max_choices: int
    ) -> None:
        self.transport = transport
        self.waits = waits
        self.openings = Openings()
        self._size = size
        self._max_choices = max_choices if transport.gives_choices else 1
        self._queued: list[_Queued] = []
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def shares(self) -> bool:
        """Whether requests are merged at all."""
        return min(self._max_choices, self._size) > 1 and not self.waits.too_long

    def member(self) -> RolloutTransport:
        """Return the transport of one rollout of the group."""
        return RolloutTransport(self)

    async def generate(self, request: GenerateRequest) -> tuple[Completion, int]:
        """Return the completion of a request for one choice, and how many tokens longer its longest
        sibling was. Raises what the transport raises."""
        loop = asyncio.get_running_loop()
        queued = _Queued(request, loop.create_future())
        self._queued.append(queued)
        if len(self._queued) >= self._size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(GRACE_SECONDS, self._send)
        return await queued.completion

    def _send(self) -> None:
        """Send the queued requests, merged into as few as possible."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        queued, self._queued = self._queued, []
        for run in _runs([own for own in queued if not own.completion.done()], self._max_choices):
            sending = asyncio.create_task(self._send_one(run))
            self._running.add(sending)
            sending.add_done_callback(self._running.discard)
            for queued_request in run:
                queued_request.completion.add_done_callback(partial(_drop, run, sending))

    async def _send_one(self, run: list[_Queued]) -> None:
        first = run[0].request
        request = replace(first, sampling=replace(first.sampling, n=len(run)))
        try:
            completions = await self.transport.generate(request)
            if len(completions) != len(run):
                raise ContractError(
                    f"the engine returned {len(completions)} choices: {len(run)} were requested"
                )
        except Exception as error:
            for queued in run:
                if not queued.completion.done():
                    queued.completion.set_exception(_copy_error(error))
            return
        longest = max(len(completion.token_ids) for completion in completions)
        # Choice i was sampled with seed + i, which is the seed of the i-th request of the run.
        for queued, completion in zip(run, completions, strict=True):
            self.waits.sampled += len(completion.token_ids)
            if not queued.completion.done():
                longer = longest - len(completion.token_ids)
                queued.completion.set_result((replace(completion, index=0), longer))


class RolloutTransport:
    """The transport of one rollout: the group's, with a first request that may be merged."""

    def __init__(self, group: GroupRequests) -> None:
        self._group = group
        self._transport = group.transport
        self._started = False
        self._waited = 0
        self.draws: list[RolloutDraw] = []
        """The requests so far and their completions, for the record of the run."""

    @property
    def name(self) -> TransportName:
        return self._transport.name

    @property
    def base_url(self) -> str:
        return self._transport.base_url

    @property
    def relay(self) -> Relay | None:
        return self._transport.relay

    @property
    def aborts_by_id(self) -> bool:
        return self._transport.aborts_by_id

    @property
    def gives_choices(self) -> bool:
        return self._transport.gives_choices

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return the completions of a request. The first request may be merged with others."""
        completions = await self._generate(request)
        self.draws += [RolloutDraw(request.alone(own.index), own) for own in completions]
        return completions

    async def _generate(self, request: GenerateRequest) -> list[Completion]:
        first, self._started = not self._started, True
        # Another turn follows: the time that the first turn waited for its siblings was lost.
        self._group.waits.waited += self._waited
        self._waited = 0
        if not (first and self._group.shares and _may_share(request)):
            return await self._transport.generate(request)
        completion, self._waited = await self._group.generate(request)
        return [completion]

    def stream(self, request: GenerateRequest) -> CompletionStream:
        return self._transport.stream(request)

    async def models(self) -> list[ModelCard]:
        return await self._transport.models()

    async def abort(self, *request_ids: str) -> int | None:
        return await self._transport.abort(*request_ids)

    async def close(self) -> None:
        await self._transport.close()


def _may_share(request: GenerateRequest) -> bool:
    """Whether the request can be merged: it has one choice, a seed and no id of its own."""
    sampling = request.sampling
    return sampling.n == 1 and sampling.seed is not None and request.request_id is None


def _runs(queued: list[_Queued], size: int) -> Iterator[list[_Queued]]:
    """Yield runs of at most `size` requests that differ only in consecutive seeds."""
    run: list[_Queued] = []
    for own in sorted(queued, key=_seed):
        if run and (len(run) == size or not _follows(run, own.request)):
            yield run
            run = []
        run.append(own)
    if run:
        yield run


def _follows(run: list[_Queued], request: GenerateRequest) -> bool:
    """Whether the next choice of the merged request equals this request."""
    first = run[0].request
    return (
        request.sampling.seed == _seed(run[0]) + len(run)
        and _same(request, first, _REQUEST)
        and _same(request.sampling, first.sampling, _SAMPLING)
    )


def _same(first: object, second: object, names: tuple[str, ...]) -> bool:
    return all(getattr(first, name) == getattr(second, name) for name in names)


def _seed(queued: _Queued) -> int:
    return queued.request.sampling.seed or 0


def _drop(run: list[_Queued], sending: asyncio.Task[None], _: object) -> None:
    """Cancel a merged request when all of its rollouts were cancelled."""
    if all(queued.completion.cancelled() for queued in run):
        sending.cancel()


def _copy_error(error: Exception) -> Exception:
    """Return a copy for one rollout, so that its notes and traceback are not shared with others."""
    return error.with_message(error.message) if isinstance(error, LockstepError) else error
