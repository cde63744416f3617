"""Base of all transports over HTTP: the client, the model cards, and the decoding of responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Concatenate, ParamSpec, TypeVar

from lockstep.backends.transport import Relay, TransportName
from lockstep.http.client.client import HttpClient
from lockstep.http.off_loop import is_large_json, off_loop
from lockstep.protocol.common.model_card import ModelCard, decode_models
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import UNKNOWN_VERSION, Reading
from lockstep.protocol.json.base64_extract import ExtractedBody
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import LockstepError, PromptTooLong

RETRY_AFTER = 5.0
"""Seconds before a lookup that failed, or did not list the model, is repeated."""


class ModelLimits:
    """A cache of model cards. A failed lookup is repeated after a few seconds."""

    def __init__(
        self, fetch: Callable[[], Awaitable[list[ModelCard]]], *, retry_after: float = RETRY_AFTER
    ) -> None:
        self._fetch = fetch
        self._retry_after = retry_after
        self._cards: dict[str, ModelCard] = {}
        self._fetched_at: float | None = None
        self._lock = asyncio.Lock()

    async def card(self, model: str | None) -> ModelCard | None:
        """Return the card of `model` (or of the only base model), or None if the server lists
        none."""
        if (card := self._find(model)) is not None:
            return card
        async with self._lock:
            if (card := self._find(model)) is not None or self._too_soon():
                return card
            self._fetched_at = monotonic()
            try:
                self._cards = {card.id: card for card in await self._fetch()}
            except LockstepError:
                # The request is sent anyway: it meets the same failure and reports it better.
                return None
            return self._find(model)

    async def check_length(self, request: GenerateRequest) -> ModelCard | None:
        """Return the card of the model. Raises PromptTooLong when the prompt leaves no room for a
        token, unless a Lockstep server only scores it: other engines reject that as well."""
        card = await self.card(request.model)
        if card is not None and (limit := card.max_model_len) is not None:
            length = len(request.prompt_ids)
            scored = card.owned_by == "lockstep" and request.sampling.fits(length, limit)
            if length >= limit and not scored:
                raise PromptTooLong.of(length, limit, param="prompt_ids")
        return card

    @property
    def names(self) -> list[str]:
        """Names of the models that the server listed last."""
        return list(self._cards)

    def _find(self, model: str | None) -> ModelCard | None:
        if model is not None:
            return self._cards.get(model)
        bases = [card for card in self._cards.values() if card.parent is None]
        return bases[0] if len(bases) == 1 else None

    def _too_soon(self) -> bool:
        return self._fetched_at is not None and monotonic() - self._fetched_at < self._retry_after


P = ParamSpec("P")
B = TypeVar("B", ExtractedBody, bytearray | ExtractedBody)
T = TypeVar("T")


class HttpTransport:
    """One server behind an `HttpClient`, which owns deadlines and retries.

    `logprob_mode` is how the server computes logprobs where its responses do not say; by default
    `usual_mode`, the default of such servers. `version` labels the tokens of servers that report no
    weight version.
    """

    name: TransportName
    usual_mode: LogprobMode
    aborts_by_id: bool
    gives_choices: bool

    def __init__(
        self,
        http: HttpClient,
        *,
        logprob_mode: LogprobMode | None = None,
        version: str | None = None,
    ) -> None:
        self._http = http
        self._mode: LogprobMode = logprob_mode or self.usual_mode
        self._version = UNKNOWN_VERSION if version is None else version
        self._limits = ModelLimits(self.models)

    @property
    def base_url(self) -> str:
        return self._http.base_url

    @property
    def relay(self) -> Relay | None:
        """None: the dialect is not the gateway's own, so bodies must be encoded anew."""
        return None

    async def models(self) -> list[ModelCard]:
        """Return the models and adapters that the server lists now."""
        return decode_models(await self._http.get("/v1/models"))

    async def close(self) -> None:
        await self._http.close()

    async def _decode(
        self,
        decode: Callable[Concatenate[B, P], T],
        response: B,
        *more: P.args,
        **options: P.kwargs,
    ) -> T:
        """Decode a response; a large one in a thread."""
        size = len(response.json if isinstance(response, ExtractedBody) else response)
        large = is_large_json(size)
        return await off_loop(large, decode, response, *more, **options)

    def _reading(self, request: GenerateRequest, card: ModelCard | None, index: int = 0) -> Reading:
        """Return what the decoder of a response to `request` needs beside the body."""
        adapter = card.id if card is not None and card.parent else None
        return Reading(request, self._mode, self._version, self.base_url, adapter, index)
