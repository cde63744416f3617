"""Routes that trainers read the configuration of a vLLM server from: /server_info and others.

They report what holds for the fleet. Weights are not updated through them but through the control
plane.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.gateway.callers import request_id
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.openapi.route_doc import QueryDoc, RouteDoc
from lockstep.http.handlers import json_response
from lockstep.tokens.errors import UnsupportedField


class VllmModelConfig(msgspec.Struct):
    """The model; `dtype` is null if no worker reports it."""

    model: str
    max_model_len: int | None
    dtype: str | None
    logprobs_mode: str


class VllmParallelConfig(msgspec.Struct):
    data_parallel_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


class VllmConfig(msgspec.Struct):
    """The parts of vLLM's configuration that a fleet has. `weight_transfer_config` is null: vLLM's
    own weight transfer is not supported."""

    model_config: VllmModelConfig
    parallel_config: VllmParallelConfig
    lora_config: dict[str, Any] | None = None
    weight_transfer_config: None = None


class ServerInfo(msgspec.Struct):
    vllm_config: VllmConfig


class WorldSize(msgspec.Struct):
    world_size: int


class CacheReset(msgspec.Struct):
    success: bool


ROUTE_DOCS = (
    RouteDoc(
        "GET", "/server_info", None, ServerInfo, "Configuration of the model, in vLLM's shape.",
        sessions=False, query=(QueryDoc("config_format", {"type": "string", "enum": ["json"]}),),
    ),
    RouteDoc(
        "GET", "/get_world_size", None, WorldSize, "Number of serving workers.", sessions=False
    ),
    RouteDoc(
        "POST", "/reset_prefix_cache", None, CacheReset,
        "Returns success: prefixes cached under older weights are never used.",
        sessions=False, body_required=False,
    ),
)  # fmt: skip


class ServerInfoRoutes:
    """GET /server_info and /get_world_size, POST /reset_prefix_cache."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self.routes = [
            Route("/server_info", self.info, methods=["GET"]),
            Route("/get_world_size", self.world_size, methods=["GET"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
        ]

    async def info(self, http: Request) -> Response:
        request_id(http)
        form = http.query_params.get("config_format", "json")
        if form != "json":
            raise UnsupportedField(
                f"config_format is {form!r}: expected json", param="config_format"
            )
        cards = await self._context.models.cards(fresh=True)
        card = next(card for card in cards if card.parent is None)
        model = VllmModelConfig(
            model=card.id,
            max_model_len=card.max_model_len,
            dtype=f"torch.{card.numerics.dtype}" if card.numerics is not None else None,
            logprobs_mode=f"{card.logprob_mode or 'raw'}_logprobs",
        )
        config = VllmConfig(model, VllmParallelConfig(self._serving()))
        return json_response(msgspec.json.encode(ServerInfo(config)))

    async def world_size(self, http: Request) -> Response:
        request_id(http)
        return json_response(msgspec.json.encode(WorldSize(self._serving())))

    async def reset_prefix_cache(self, http: Request) -> Response:
        """Return success without a change.

        Cached prefixes are keyed by the weights they were computed with, so none of them is used
        after an update. /v1/rl/flush_cache drops them.
        """
        request_id(http)
        return json_response(msgspec.json.encode(CacheReset(success=True)))

    def _serving(self) -> int:
        return sum(worker.serves for worker in self._context.pool.workers)
