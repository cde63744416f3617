"""What a server says about its models, kept while it holds, and the checks that need it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

from lockstep.protocol.common.model_card import ModelCard
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens.errors import LockstepError, PromptTooLong

RETRY_AFTER = 5.0
"""Seconds before a failed lookup, or one that did not list the model, is tried again."""


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
                raise PromptTooLong.of(length, card.max_model_len, param="prompt_ids")
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
