"""What a server says about its models, kept while it holds, and the checks that need it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import msgspec

from lockstep.backends.transport import ModelCard
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import decode_response
from lockstep.tokens.errors import ContractError, LockstepError, PromptTooLong
from lockstep.tokens.numerics import NumericsPlan

RETRY_AFTER = 5.0
"""Seconds before a failed lookup, or one that did not list the model, is tried again."""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    context_window: int | None = None
    weight_version: str | None = None
    parent: str | None = None
    owned_by: str | None = None
    numerics: dict[str, Any] | None = None


class _List(msgspec.Struct):
    data: list[_Card] | None = None


DECODER = msgspec.json.Decoder(_List)


def read_models(body: bytes | bytearray) -> list[ModelCard]:
    """The cards of GET /v1/models. An adapter without a length of its own has its parent's."""
    cards = decode_response(DECODER, body).data
    if cards is None:
        raise ContractError("/v1/models has no data: expected a list of model cards")
    lengths = {card.id: card.max_model_len or card.context_window for card in cards}
    return [
        ModelCard(
            id=card.id,
            max_model_len=lengths[card.id] or lengths.get(card.parent or ""),
            weight_version=card.weight_version,
            parent=card.parent,
            owned_by=card.owned_by,
            numerics=_plan(card),
        )
        for card in cards
    ]


def _plan(card: _Card) -> NumericsPlan | None:
    try:
        return None if card.numerics is None else NumericsPlan.from_json(card.numerics)
    except TypeError as error:
        raise ContractError(f"the card of {card.id!r} has a broken numerics: {error}") from None


class ModelLimits:
    """Remembers model cards; a failed lookup is forgotten after a few seconds."""

    def __init__(
        self, fetch: Callable[[], Awaitable[list[ModelCard]]], *, retry_after: float = RETRY_AFTER
    ) -> None:
        self._fetch = fetch
        self._retry_after = retry_after
        self._cards: dict[str, ModelCard] = {}
        self._fetched_at: float | None = None
        self._lock = asyncio.Lock()

    async def card(self, model: str | None) -> ModelCard | None:
        """The card of `model` (or of the only base model), None when the server does not tell."""
        if (known := self._find(model)) is not None:
            return known
        async with self._lock:
            if (known := self._find(model)) is not None or self._too_soon():
                return known
            self._fetched_at = monotonic()
            try:
                self._cards = {card.id: card for card in await self._fetch()}
            except LockstepError:
                # The request itself goes on: it will meet the same trouble and name it better.
                return None
            return self._find(model)

    async def check_length(self, request: GenerateRequest) -> ModelCard | None:
        """The card of the model. Raises PromptTooLong when the prompt fills its whole context."""
        card = await self.card(request.model)
        if card is not None and card.max_model_len is not None:
            length = len(request.prompt_ids)
            if length >= card.max_model_len:
                raise PromptTooLong(
                    f"the prompt has {length} tokens and {card.id} holds {card.max_model_len}: "
                    "not one more token fits",
                    param="prompt_ids",
                )
        return card

    @property
    def known(self) -> list[str]:
        return list(self._cards)

    def _find(self, model: str | None) -> ModelCard | None:
        if model is not None:
            return self._cards.get(model)
        bases = [card for card in self._cards.values() if card.parent is None]
        return bases[0] if len(bases) == 1 else None

    def _too_soon(self) -> bool:
        return self._fetched_at is not None and monotonic() - self._fetched_at < self._retry_after
