"""POST /v1/completions: text or ids in, text and ids out, and prompts scored with echo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Worker
from lockstep.gateway.context import GatewayContext, request_id, session_id
from lockstep.gateway.models import ServedModel
from lockstep.gateway.openapi.route_doc import RouteDoc
from lockstep.gateway.routes.completions_response import CompletionPrompt, CompletionWriter, Items
from lockstep.gateway.routes.token_text import TokenSpelling
from lockstep.http.handlers import EventStream, json_response, read_json, unless_gone
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import StreamDelta
from lockstep.protocol.openai.completions import (
    CompletionRequest,
    CompletionResponse,
    decode_completion,
)
from lockstep.render import Renderer
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadRequest, BadTokenId

OPERATIONS = (
    RouteDoc(
        "POST", "/v1/completions", CompletionRequest, CompletionResponse,
        "Completions of text or token ids; with echo and max_tokens 0, scores of a prompt.",
        streams=True,
    ),
)  # fmt: skip


class CompletionsRoutes:
    """The legacy route. A session header only steers routing: nothing here is a conversation."""

    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        self.routes = [HttpRoute("/v1/completions", self.complete, methods=["POST"])]

    async def complete(self, http: Request) -> Response:
        request_id(http)
        asked = decode_completion(await read_json(http, self._gateway.body_limit))
        chosen = request_id(http, asked.request_id)
        served = await self._gateway.book.resolve(asked.model)
        renderer = await self._gateway.book.renderer()
        prompts = await self._prompts(http, asked, served, renderer, chosen)
        spelling = TokenSpelling(
            renderer,
            as_ids=bool(asked.return_tokens_as_token_ids),
            keep_special=asked.skip_special_tokens is False,
        )
        writer = CompletionWriter(asked, served.name, spelling, prompts, chosen)
        if not asked.stream:
            done = await unless_gone(http, self._all(prompts))
            return json_response(msgspec.json.encode(writer.whole(done)))
        events = writer.events([self._items(prompt) for prompt in prompts])
        return await EventStream.started(http, events, chosen)

    async def _prompts(
        self,
        http: Request,
        asked: CompletionRequest,
        served: ServedModel,
        renderer: Renderer,
        chosen: str,
    ) -> list[CompletionPrompt]:
        sampling, session = asked.sampling(), session_id(http)
        given = asked.prompts()
        special = asked.add_special_tokens is not False
        prompts: list[CompletionPrompt] = []
        for at, each in enumerate(given):
            text = each if isinstance(each, str) else None
            if isinstance(each, str):
                ids = await renderer.offload(renderer.encode, each, special=special)
            else:
                ids = each
            if not ids:
                where = "prompt" if len(given) == 1 else f"prompt[{at}]"
                raise BadTokenId(f"{where} is empty: it has no token", param=where)
            _check_start(asked.experts_start, len(ids))
            ask = GenerateRequest(
                prompt_ids=ids,
                sampling=sampling,
                model=served.name,
                request_id=chosen if len(given) == 1 else f"{chosen}-{at}",
                cache_salt=asked.cache_salt,
                priority=asked.priority or 0,
                experts_start=asked.experts_start,
                weight_version=asked.weight_version,
                min_weight_version=asked.min_weight_version,
            )
            route = Affinity.of(ids, session=session, salt=asked.cache_salt, adapter=served.adapter)
            prompts.append(CompletionPrompt(text, ask, route, at * sampling.n))
        return prompts

    async def _all(self, prompts: Sequence[CompletionPrompt]) -> list[list[Completion]]:
        """The completions of every prompt; when one fails the others are cancelled."""
        if len(prompts) == 1:
            return [await self._one(prompts[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(prompt)) for prompt in prompts]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, prompt: CompletionPrompt) -> list[Completion]:
        async def call(worker: Worker) -> list[Completion]:
            return await worker.generate(prompt.ask)

        return await self._gateway.pool.run(prompt.route, call)

    def _items(self, prompt: CompletionPrompt) -> Items:
        def opened(worker: Worker) -> AsyncIterator[StreamDelta | Completion]:
            return worker.stream(prompt.ask)

        return self._gateway.pool.stream(prompt.route, opened)


def _check_start(start: int | None, length: int) -> None:
    if start is not None and not 0 <= start <= length:
        raise BadRequest(
            f"routed_experts_prompt_start is {start}: expected a position of the prompt, 0 to "
            f"{length}",
            param="routed_experts_prompt_start",
        )
