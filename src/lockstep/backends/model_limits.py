"""Cache of a server's model cards, and the checks that need them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from lockstep.protocol.common.model_card import ModelCard
from lockstep.protocol.common.request import GenerateRequest
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
        """Return the card of the model. Raises PromptTooLong when the prompt fills the whole
        context."""
        card = await self.card(request.model)
        if card is not None and card.max_model_len is not None:
            length = len(request.prompt_ids)
            if length >= card.max_model_len:
                raise PromptTooLong.of(length, card.max_model_len, param="prompt_ids")
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
