"""POST /v1/completions: completions of text or ids, and prompts scored with echo."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep import tracing
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.worker import Worker
from lockstep.gateway.callers import caller_of, request_id, session_id
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.model_registry import ServedModel
from lockstep.gateway.openapi.route_doc import RouteDoc
from lockstep.gateway.routes.completions_response import CompletionPrompt, CompletionWriter, Items
from lockstep.gateway.routes.token_text import TokenSpelling
from lockstep.gateway.turn.context_limit import check_text_fits
from lockstep.gateway.turn.open import join_session
from lockstep.gateway.turn.token_turn import TokenTurn
from lockstep.http.handlers import EventStream, json_response
from lockstep.http.http_request import read_body, unless_gone
from lockstep.http.off_loop import is_large_response, off_loop
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

ROUTE_DOCS = (
    RouteDoc(
        "POST", "/v1/completions", CompletionRequest, CompletionResponse,
        "Completions of text or token ids; with echo and max_tokens 0, scores of a prompt.",
        streams=True,
    ),
)  # fmt: skip


class CompletionsRoutes:
    """POST /v1/completions. A session stores its turns by their ids."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self.routes = [HttpRoute("/v1/completions", self.complete, methods=["POST"])]

    async def complete(self, http: Request) -> Response:
        request_id(http)
        body = await read_body(http, decode_completion, self._context.limits)
        client_id = request_id(http, body.request_id)
        model = await self._context.models.resolve(body.model, caller_of(http).tenant)
        renderer = await self._context.models.renderer()
        if tracing.active is not None:
            tracing.active.start_turn("text_completion", model.name, session_id(http))
        prompts = await self._prompts(http, body, model, renderer, client_id)
        spelling = TokenSpelling(
            renderer,
            as_ids=bool(body.return_tokens_as_token_ids),
            keep_special=body.skip_special_tokens is False,
        )
        writer = CompletionWriter(body, model.name, spelling, prompts, client_id)
        if not body.stream:
            completions = await unless_gone(http, self._sample_all(prompts))
            large = any(is_large_response(choices, body.logprobs or 0) for choices in completions)
            return json_response(await off_loop(large, _encode, writer, completions))
        events = writer.events([self._stream(prompt) for prompt in prompts])
        return await EventStream.started(http, events, client_id)

    async def _prompts(
        self,
        http: Request,
        body: CompletionRequest,
        model: ServedModel,
        renderer: Renderer,
        client_id: str,
    ) -> list[CompletionPrompt]:
        sampling, name, caller = body.sampling(), session_id(http), caller_of(http)
        session = await join_session(http, self._context, renderer)
        salt = caller.cache_salt(body.cache_salt)
        inputs = body.prompts()
        special = body.add_special_tokens is not False
        prompts: list[CompletionPrompt] = []
        for at, prompt in enumerate(inputs):
            text = prompt if isinstance(prompt, str) else None
            if isinstance(prompt, str):
                await check_text_fits([prompt], renderer, model.max_model_len, "prompt")
                ids = await off_loop(True, renderer.encode, prompt, special=special)
            else:
                ids = prompt
            if not ids:
                where = "prompt" if len(inputs) == 1 else f"prompt[{at}]"
                raise BadTokenId(f"{where} is empty: it has no token", param=where)
            _check_start(body.routed_experts_prompt_start, len(ids))
            worker_id = caller.request_id(client_id if len(inputs) == 1 else f"{client_id}-{at}")
            request = GenerateRequest(
                prompt_ids=ids,
                sampling=sampling,
                model=model.name,
                request_id=worker_id,
                cache_salt=salt,
                priority=body.priority or 0,
                experts_start=body.experts_start,
                experts_skipped=body.routed_experts_prompt_start,
                support=body.return_sampling_mask or (None if session else False),
                weight_version=body.weight_version,
                min_weight_version=body.min_weight_version,
                headers=caller.headers(worker_id),
            )
            affinity = Affinity.of(ids, session=name, salt=salt, adapter=model.adapter)
            turn = None
            if not body.scores:
                turn = await TokenTurn.of(
                    session, ids, sampling, model.adapter, model.max_model_len
                )
            if turn is not None:
                request = replace(request, sampling=turn.sampling)
            prompts.append(CompletionPrompt(text, request, affinity, at * sampling.n, turn))
        return prompts

    async def _sample_all(self, prompts: Sequence[CompletionPrompt]) -> list[list[Completion]]:
        """Sample every prompt; when one fails, the others are cancelled."""
        if len(prompts) == 1:
            return [await self._sample(prompts[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._sample(prompt)) for prompt in prompts]
        except BaseExceptionGroup as failures:
            # Several prompts may have failed: the client gets the first error.
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _sample(self, prompt: CompletionPrompt) -> list[Completion]:
        async def call(worker: Worker) -> list[Completion]:
            return await worker.generate(prompt.request)

        completions = await self._context.pool.run(prompt.affinity, call, prompt.request)
        if prompt.turn is not None:
            await prompt.turn.commit(completions)
        return completions

    def _stream(self, prompt: CompletionPrompt) -> Items:
        def open_stream(worker: Worker) -> AsyncIterator[StreamDelta | Completion]:
            return worker.stream(prompt.request)

        return self._context.pool.stream(prompt.affinity, open_stream, prompt.request)


def _encode(writer: CompletionWriter, completions: list[list[Completion]]) -> bytes:
    return msgspec.json.encode(writer.whole(completions))


def _check_start(start: int | None, length: int) -> None:
    if start is not None and not 0 <= start <= length:
        raise BadRequest(
            f"routed_experts_prompt_start is {start}: expected a position of the prompt, 0 to "
            f"{length}",
            param="routed_experts_prompt_start",
        )
