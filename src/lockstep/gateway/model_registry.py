"""The models that the gateway serves, and the renderer of their messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic

from lockstep.backends.transport import ModelCard
from lockstep.fleet.response_check import ResponseCheck
from lockstep.render import Renderer
from lockstep.storage.api_keys import DEFAULT_TENANT
from lockstep.tokens.errors import BadRequest, UnknownModel

AdapterFinder = Callable[[str, str], Awaitable[str | None]]
"""Returns the adapter that a model name stands for, for a tenant; None for an unknown name."""
FRESH_SECONDS = 1.0
"""Age in seconds past which the list of models is fetched again for an unknown name."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model name that requests may use: the base model, or an adapter on it."""

    name: str
    adapter: str | None
    max_model_len: int | None
    weight_version: str | None


PADDING = 2048
"""Ids beyond the tokenizer's that a worker may return, as models pad their vocabulary."""


class ModelRegistry:
    """Resolves model names against a cached list, which `fetch` gets from the workers.

    `find_adapter` resolves names that are not on it, and loads their adapters. Adapters whose names
    start with `private` belong to single tenants: only `find_adapter` returns them.
    `response_check` learns the size of the vocabulary once the tokenizer is loaded.
    """

    def __init__(
        self,
        fetch: Callable[[], Awaitable[list[ModelCard]]],
        tokenizer: str | None = None,
        find_adapter: AdapterFinder | None = None,
        private: str | None = None,
        response_check: ResponseCheck | None = None,
        control_tokens_in_text: bool = False,
    ) -> None:
        self._fetch = fetch
        self._find_adapter = find_adapter
        self._private = private
        self._response_check = response_check
        self._load = partial(Renderer.load, control_tokens_in_text=control_tokens_in_text)
        self._tokenizer = tokenizer
        self._cards: dict[str, ModelCard] = {}
        self._fetched_at = float("-inf")
        self._lock = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._renderer: Renderer | None = None

    async def cards(self, *, fresh: bool = False, private: bool = False) -> list[ModelCard]:
        """Return the served models, base first; with `private`, also adapters of single tenants.
        Raises Unavailable when no worker responds."""
        if fresh or not self._cards:
            await self._refresh()
        return [card for card in self._cards.values() if private or not self._is_private(card.id)]

    def _is_private(self, name: str) -> bool:
        return self._private is not None and name.startswith(self._private)

    async def resolve(self, name: str | None, tenant: str = DEFAULT_TENANT) -> ServedModel:
        """Return a model by name, or the only base model. Raises UnknownModel or BadRequest, and
        what the finder of a tenant's adapters raises."""
        if not self._cards:
            await self._refresh()
        if name is not None and name not in self._cards and self._find_adapter is not None:
            # A trainer's names (a sampler's path, say) are never on the list: it is not refreshed
            # for them.
            adapter, base = await self._find_adapter(name, tenant), self._base()
            if adapter is not None and adapter != base.id:
                # Not looked up in the list, which may be older than the adapter.
                return ServedModel(adapter, adapter, base.max_model_len, base.weight_version)
            name = adapter or name
        if name is not None and (name not in self._cards or self._is_private(name)):
            if monotonic() - self._fetched_at > FRESH_SECONDS:
                await self._refresh()
            if name not in self._cards or self._is_private(name):
                public = (card for card in self._cards if not self._is_private(card))
                names = ", ".join(public) or "none"
                raise UnknownModel(
                    f"the model {name!r} does not exist; served are {names}", param="model"
                )
        card = self._cards[name] if name is not None else self._base()
        adapter = card.id if card.parent is not None else None
        return ServedModel(card.id, adapter, card.max_model_len, card.weight_version)

    @property
    def base_name(self) -> str | None:
        """The base model of the cached list; None before the first fetch."""
        return next((card.id for card in self._cards.values() if card.parent is None), None)

    async def renderer(self) -> Renderer:
        """Return the renderer of the base model's messages, loaded once."""
        if self._renderer is None:
            async with self._loading:
                if self._renderer is None:
                    # Not `off_loop`: a download would hold one of its few threads.
                    renderer = await asyncio.to_thread(self._load, await self._source())
                    if self._response_check is not None:
                        size = len(renderer.tokenizer)
                        self._response_check.vocab_size = size + max(PADDING, size // 8)
                    self._renderer = renderer
        return self._renderer

    async def _source(self) -> str:
        if self._tokenizer is None:
            await self.resolve(None)
            return self._base().id
        return self._tokenizer

    def forget(self) -> None:
        """Drop the cached list, after a change of adapters or weights."""
        self._cards = {}

    def _base(self) -> ModelCard:
        bases = [card for card in self._cards.values() if card.parent is None]
        if len(bases) != 1:
            names = ", ".join(card.id for card in bases)
            raise BadRequest(f"{len(bases)} models are served ({names}): name one", param="model")
        return bases[0]

    async def _refresh(self) -> None:
        # Requests that miss at the same time wait for one fetch.
        async with self._lock:
            if self._cards and monotonic() - self._fetched_at < FRESH_SECONDS:
                return
            cards = await self._fetch()
            self._fetched_at = monotonic()
            self._cards = {card.id: card for card in sorted(cards, key=lambda c: c.parent or "")}
