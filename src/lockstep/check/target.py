"""The server under check: how it is reached, what is known of it, and what rows may do to it."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from lockstep.backends.admin import Admin
from lockstep.backends.dynamo.discovery import DynamoDiscovery
from lockstep.backends.registry import open_admin, open_transport
from lockstep.backends.transport import ModelCard, Transport, TransportName
from lockstep.check.dialect import DIALECTS, RawDialect
from lockstep.check.outcome import Broken, NotApplicable
from lockstep.check.raw import Raw, RawReply
from lockstep.protocol.common.request import GenerateRequest
from lockstep.render import Renderer
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable, UnknownModel

IDS = range(10, 250)
"""Ids of test prompts: in every vocabulary, and in no order that a tokenizer would write."""
LONG = 800
"""Tokens of a generation that something happens to: long enough to be met in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The server to check and how, as the command line says it."""

    url: str
    model: str | None = None
    transport: TransportName | None = None
    api_key: str | None = None
    tokenizer: Path | None = None
    tolerance: float = 1e-3
    admin: str | None = None
    token: str | None = None
    mutate: bool = False
    checkpoint: Path | None = None
    adapters: tuple[Path, ...] = ()
    seconds: float = 60.0


@dataclass(slots=True, kw_only=True)
class Target:
    """Everything a row needs. Rows send through it and never open anything themselves."""

    options: CheckOptions
    transport: Transport
    raw: Raw
    card: ModelCard
    cards: list[ModelCard]
    renderer: Renderer | None = None
    config: dict[str, Any] = field(default_factory=dict)
    control: Admin | None = None

    # What is known

    @property
    def tolerance(self) -> float:
        return self.options.tolerance

    @property
    def dialect(self) -> RawDialect:
        return DIALECTS[self.transport.name]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of generations that something happens to, in turn: a small engine may be through
        with the first before a busy client comes to it, which says nothing yet."""
        longest = (self.card.max_model_len or 2048) * 3 // 4
        return tuple(min(LONG * times, longest) for times in (1, 2, 4))

    @property
    def long(self) -> int:
        """How many tokens a long generation may have here."""
        return self.lengths[0]

    @property
    def admin(self) -> Admin:
        if self.control is None:
            raise NotApplicable("no admin URL was given (--admin)")
        return self.control

    @property
    def checkpoint(self) -> Path:
        if self.options.checkpoint is None:
            raise NotApplicable("no checkpoint was given (--checkpoint)")
        return self.options.checkpoint

    def prompt(self, length: int = 24, seed: int = 0) -> list[int]:
        """Ids that no text has: they do not survive a server that turns them into text."""
        rng = random.Random(seed)
        return [rng.choice(IDS) for _ in range(min(length, (self.card.max_model_len or 64) // 2))]

    # Requests

    def request(
        self,
        ids: list[int],
        *,
        model: str | None = None,
        cache_salt: str | None = None,
        request_id: str | None = None,
        experts_start: int | None = None,
        **sampling: Any,
    ) -> GenerateRequest:
        """A request; greedy unless `sampling` says otherwise, and never ended by an EOS."""
        how = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | sampling
        return GenerateRequest(
            prompt_ids=ids,
            sampling=Sampling(**how),
            model=model or self.card.id,
            cache_salt=cache_salt,
            request_id=request_id,
            experts_start=experts_start,
            timeout=self.options.seconds,
        )

    async def one(self, ids: list[int], **how: Any) -> Completion:
        """One completion; `how` is that of `request`."""
        (completion,) = await self.transport.generate(self.request(ids, **how))
        return completion

    async def score(self, ids: Sequence[int], *, model: str | None = None) -> list[float]:
        """Logprobs of every token after the first, computed anew: under a salt of their own."""
        completion = await self.one(
            list(ids), model=model, cache_salt=uuid4().hex, max_tokens=1, prompt_logprobs=0
        )
        if completion.prompt_logprobs is None:
            raise Broken(f"prompt logprobs were asked for {len(ids)} ids, and none came")
        missing = [at for at, one in enumerate(completion.prompt_logprobs) if at and one is None]
        if missing:
            raise Broken(f"no logprob came for the prompt tokens at {missing[:5]}")
        return [one.logprob for one in completion.prompt_logprobs[1:] if one is not None]

    async def scores(
        self, sequences: Sequence[Sequence[int]], *, model: str | None = None
    ) -> list[list[float]]:
        """Of several sequences, one after the other: see `crowd.scores` for why."""
        return [await self.score(ids, model=model) for ids in sequences]

    async def post(self, path: str, body: object) -> RawReply:
        return await self.raw.send("POST", self.transport.base_url + path, body)

    async def send_ids(self, ids: Any, *, model: str | None = None, **fields: Any) -> RawReply:
        """A bare request for one token; `fields` are put beside what the dialect knows."""
        body = self.dialect.body(model or self.card.id, ids)
        return await self.post(self.dialect.route, body | fields)


@asynccontextmanager
async def open_target(options: CheckOptions) -> AsyncIterator[Target]:
    """The server, reached and recognised. Raises BadRequest, Unavailable or UnknownModel."""
    if options.mutate and options.admin is None:
        raise BadRequest("--mutate needs the admin URL: give --admin", param="admin")
    renderer = None if options.tokenizer is None else Renderer.load(options.tokenizer)
    raw = Raw(api_key=options.api_key, timeout=options.seconds)
    transport = await open_transport(
        options.url, options.transport, api_key=options.api_key, timeout=options.seconds
    )
    control: Admin | None = None
    try:
        cards = await transport.models()
        if options.mutate and options.admin is not None:
            control = await _open_admin(options.admin, options.token)
        yield Target(
            options=options,
            transport=transport,
            raw=raw,
            card=_choose(cards, options.model),
            cards=cards,
            renderer=renderer,
            config=_config(options),
            control=control,
        )
    finally:
        await transport.close()
        if control is not None:
            await control.close()


async def _open_admin(url: str, token: str | None) -> Admin:
    """The driver for a worker's admin URL, or for the one worker behind a Dynamo discovery URL.

    Raises BadRequest when there are several workers: the kit changes one server at a time.
    """
    discovery = DynamoDiscovery(url, url=url)
    try:
        workers = await discovery.find()
    except LockstepError:
        # Not Dynamo's discovery: a worker, or nothing, which the next error says better.
        return await open_admin(url, token)
    finally:
        await discovery.close()
    ready = [worker for worker in workers if worker.ready and worker.admin_url]
    if not ready:
        raise Unavailable(f"{url} lists no worker with an admin URL")
    if len(ready) > 1:
        raise BadRequest(
            f"{url} lists {len(ready)} workers: requests are not pinned, so a row could not tell "
            "which one answered; check a deployment of one",
            param="admin",
        )
    return await open_admin(ready[0].admin_url or "", token, "dynamo", routes=ready[0].routes)


def _choose(cards: list[ModelCard], model: str | None) -> ModelCard:
    bases = [card for card in cards if card.parent is None]
    wanted = [card for card in cards if card.id == model] if model else bases
    if len(wanted) == 1:
        return wanted[0]
    served = ", ".join(card.id for card in cards) or "nothing"
    if model:
        raise UnknownModel(f"the model {model!r} is not served there; served are {served}")
    raise BadRequest(f"name the model with --model: served are {served}", param="model")


def _config(options: CheckOptions) -> dict[str, Any]:
    """The model's config.json, where the tokenizer's or the checkpoint's directory has one."""
    for directory in (options.tokenizer, options.checkpoint):
        path = None if directory is None else directory / "config.json"
        if path is not None and path.is_file():
            return dict(json.loads(path.read_text()))
    return {}
