"""The server under test: its connection, what is known about it, and requests for rows."""

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
"""Ids of test prompts: in every vocabulary, in an order that no tokenizer produces."""
LONG = 800
"""Tokens of a generation that a row acts on: long enough to be still in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The server to test and how, from the command line."""

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
    """Everything a row needs. Rows send requests through it and open nothing themselves."""

    options: CheckOptions
    transport: Transport
    raw: Raw
    card: ModelCard
    cards: list[ModelCard]
    renderer: Renderer | None = None
    config: dict[str, Any] = field(default_factory=dict)
    control: Admin | None = None

    # Properties

    @property
    def tolerance(self) -> float:
        return self.options.tolerance

    @property
    def dialect(self) -> RawDialect:
        return DIALECTS[self.transport.name]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Token counts to try for generations that a row acts on: a small engine may finish the
        first before a busy client acts, which proves nothing.
        """
        longest = (self.card.max_model_len or 2048) * 3 // 4
        return tuple(min(LONG * times, longest) for times in (1, 2, 4))

    @property
    def long(self) -> int:
        """Maximum number of tokens of a long generation on this server."""
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
        """Return ids that no text produces: a server that converts them to text changes them."""
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
        """Return a request; greedy unless `sampling` is set, and never ended by an EOS token."""
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
        """Return one completion; `how` is passed to `request`."""
        (completion,) = await self.transport.generate(self.request(ids, **how))
        return completion

    async def score(self, ids: Sequence[int], *, model: str | None = None) -> list[float]:
        """Return the logprobs of every token after the first, computed under their own cache
        salt.
        """
        completion = await self.one(
            list(ids), model=model, cache_salt=uuid4().hex, max_tokens=1, prompt_logprobs=0
        )
        if completion.prompt_logprobs is None:
            raise Broken(f"prompt logprobs were asked for {len(ids)} ids, and none came")
        missing = [
            at for at, entry in enumerate(completion.prompt_logprobs) if at and entry is None
        ]
        if missing:
            raise Broken(f"no logprob came for the prompt tokens at {missing[:5]}")
        return [entry.logprob for entry in completion.prompt_logprobs[1:] if entry is not None]

    async def scores(
        self, sequences: Sequence[Sequence[int]], *, model: str | None = None
    ) -> list[list[float]]:
        """Score several sequences, one after the other: see `crowd.scores` for the reason."""
        return [await self.score(ids, model=model) for ids in sequences]

    async def post(self, path: str, body: object) -> RawReply:
        return await self.raw.send("POST", self.transport.base_url + path, body)

    async def send_ids(self, ids: Any, *, model: str | None = None, **fields: Any) -> RawReply:
        """Send a bare request for one token; `fields` are added to the dialect's own."""
        body = self.dialect.body(model or self.card.id, ids)
        return await self.post(self.dialect.route, body | fields)


@asynccontextmanager
async def open_target(options: CheckOptions) -> AsyncIterator[Target]:
    """Connect to the server and detect it. Raises BadRequest, Unavailable or UnknownModel."""
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
    """Return the driver of a worker's admin URL, or of the one worker behind a Dynamo discovery
    URL.

    Raises BadRequest if there are several workers: the kit changes one server at a time.
    """
    discovery = DynamoDiscovery(url, url=url)
    try:
        workers = await discovery.find()
    except LockstepError:
        # Not Dynamo's discovery: a worker, or nothing, which the next error describes better.
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
    """Return the model's config.json from the tokenizer's or the checkpoint's directory, if any."""
    for directory in (options.tokenizer, options.checkpoint):
        path = None if directory is None else directory / "config.json"
        if path is not None and path.is_file():
            return dict(json.loads(path.read_text()))
    return {}
