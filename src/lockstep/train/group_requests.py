"""The first requests of a group's rollouts: those that differ in their seed alone are sent as one.

The rollouts of a group begin with the same prompt. As one request with a choice for each they cost
one round trip and one prefill. Choice i of a request has its seed plus i, and the rollouts of a
group have seeds that count up: each gets the very tokens that a request of its own would give.
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

GRACE_SECONDS = 0.02
"""How long the first of a group to send a request waits for the others."""
EVIDENCE_TOKENS = 256
"""Tokens of choices after which waits for siblings are judged."""
MOST_WAITED = 0.25
"""Of the tokens of choices, how many may be waited for by rollouts that had ended before."""
_REQUEST = tuple(each.name for each in fields(GenerateRequest) if each.name != "sampling")
_SAMPLING = tuple(each.name for each in fields(Sampling) if each.name != "seed")


@dataclass(slots=True)
class SiblingWaits:
    """How long rollouts that go on have waited for the others of their request, in tokens.

    A response comes when its longest choice has ended. Where that is the end of all of them nobody
    waits; a conversation whose next turn is held up by it should have had a request of its own.
    """

    sampled: int = 0
    waited: int = 0

    @property
    def too_long(self) -> bool:
        """Whether requests of their own would be better."""
        return self.sampled > EVIDENCE_TOKENS and self.waited > MOST_WAITED * self.sampled


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that is not sent yet, and who waits for its completion."""

    request: GenerateRequest
    completion: asyncio.Future[tuple[Completion, int]]


class GroupRequests:
    """Collects the first requests of the `size` rollouts of one group.

    One request has at most `most` choices, so that a group does not crowd on one worker of many.
    """

    def __init__(self, transport: Transport, waits: SiblingWaits, *, size: int, most: int) -> None:
        self.transport = transport
        self.waits = waits
        self.openings = Openings()
        self._size = size
        self._most = most if transport.gives_choices else 1
        self._waiting: list[_Waiting] = []
        self._running: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def shares(self) -> bool:
        """Whether requests are sent together at all."""
        return min(self._most, self._size) > 1 and not self.waits.too_long

    def member(self) -> RolloutTransport:
        """The transport of one rollout of the group."""
        return RolloutTransport(self)

    async def generate(self, request: GenerateRequest) -> tuple[Completion, int]:
        """The completion of a request for one choice, and how many tokens its longest sibling had
        more. Raises what the transport raises."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.create_future())
        self._waiting.append(waiting)
        if len(self._waiting) >= self._size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(GRACE_SECONDS, self._send)
        return await waiting.completion

    def _send(self) -> None:
        """Sends what has come, in as few requests as give the same."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for run in _runs([each for each in waiting if not each.completion.done()], self._most):
            sending = asyncio.create_task(self._send_one(run))
            self._running.add(sending)
            sending.add_done_callback(self._running.discard)
            for each in run:
                each.completion.add_done_callback(partial(_drop, run, sending))

    async def _send_one(self, run: list[_Waiting]) -> None:
        first = run[0].request
        request = replace(first, sampling=replace(first.sampling, n=len(run)))
        try:
            completions = await self.transport.generate(request)
            if len(completions) != len(run):
                raise ContractError(f"{len(run)} choices were requested, {len(completions)} came")
        except Exception as error:
            for each in run:
                if not each.completion.done():
                    each.completion.set_exception(_own(error))
            return
        longest = max(len(each.token_ids) for each in completions)
        for each, completion in zip(run, completions, strict=True):
            self.waits.sampled += len(completion.token_ids)
            if not each.completion.done():
                longer = longest - len(completion.token_ids)
                each.completion.set_result((replace(completion, index=0), longer))


class RolloutTransport:
    """The transport of one rollout: the group's, with requests that may be shared."""

    def __init__(self, group: GroupRequests) -> None:
        self._group = group
        self._transport = group.transport
        self._began = False
        self._waited = 0

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
        """What the group's transport gives; the first request may be sent with those of others."""
        first, self._began = not self._began, True
        # It goes on: what its first turn waited for the siblings was lost.
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
    """Whether a choice of another request can be this one's: it has a seed, and no name."""
    sampling = request.sampling
    return sampling.n == 1 and sampling.seed is not None and request.request_id is None


def _runs(waiting: list[_Waiting], most: int) -> Iterator[list[_Waiting]]:
    """Those that differ in nothing but a seed that counts up, at most `most` together."""
    run: list[_Waiting] = []
    for each in sorted(waiting, key=_seed):
        if run and (len(run) == most or not _follows(run, each.request)):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _follows(run: list[_Waiting], request: GenerateRequest) -> bool:
    """Whether the request is what the next choice of the run's would be."""
    first = run[0].request
    return (
        request.sampling.seed == _seed(run[0]) + len(run)
        and _same(request, first, _REQUEST)
        and _same(request.sampling, first.sampling, _SAMPLING)
    )


def _same(one: object, other: object, names: tuple[str, ...]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _seed(waiting: _Waiting) -> int:
    return waiting.request.sampling.seed or 0


def _drop(run: list[_Waiting], sending: asyncio.Task[None], _: object) -> None:
    """Ends a request that nobody waits for any more."""
    if all(each.completion.cancelled() for each in run):
        sending.cancel()


def _own(error: Exception) -> Exception:
    """The error as that of one rollout: its notes and its traceback are not those of the others."""
    return error.with_message(error.message) if isinstance(error, LockstepError) else error
