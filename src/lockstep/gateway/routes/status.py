"""GET /health and GET /v1/models: whether the fleet serves, and which models."""

from __future__ import annotations

from dataclasses import replace
from time import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.gateway.context import GatewayContext
from lockstep.http.handlers import json_response
from lockstep.protocol.common.model_card import ModelCard, ModelList
from lockstep.tokens.errors import Unavailable, UnknownModel


class StatusRoutes:
    """The health of the fleet, and its models in OpenAI's and vLLM's shape."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._started = int(time())
        self.routes = [
            Route("/health", self.health),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
        ]

    async def health(self, _: Request) -> Response:
        states = [worker.state for worker in self._context.pool.workers]
        if "serving" not in states:
            raise Unavailable(
                f"none of {len(states)} workers is serving; /v1/rl/state on the admin port says why"
            )
        return json_response(
            {"status": "ok", "workers": len(states), "serving": states.count("serving")}
        )

    async def models(self, _: Request) -> Response:
        """Return the base model, then its adapters with their parent."""
        cards = await self._cards()
        return json_response(ModelList(list(cards.values())))

    async def model(self, http: Request) -> Response:
        name, cards = http.path_params["model"], await self._cards()
        if name not in cards:
            raise UnknownModel(
                f"the model {name!r} does not exist; served are {', '.join(cards)}", param="model"
            )
        return json_response(cards[name])

    async def _cards(self) -> dict[str, ModelCard]:
        return {
            card.id: replace(card, created=self._started, owned_by="lockstep", root=card.id)
            for card in await self._context.models.cards(fresh=True)
        }
