"""The first stage of a turn: the model, the session and the worker request of a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import time

from starlette.requests import Request

from lockstep import tracing
from lockstep.fleet.routing.affinity import Affinity
from lockstep.gateway.callers import caller_of, request_id, session_id
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.sessions.cache import Session
from lockstep.gateway.turn.context_limit import (
    CHARACTERS_PER_TOKEN,
    check_chat_fits,
    name_harness,
)
from lockstep.gateway.turn.harness import origin_of
from lockstep.gateway.turn.prompt import plan_prompt
from lockstep.gateway.turn.template_variables import RendererVariants
from lockstep.gateway.turn.turn import TOKENS_HEADER, GatewayTurn
from lockstep.http.http_request import body_bytes
from lockstep.ledger.branch_sample import check_comparable
from lockstep.ledger.breaks import GATEWAY_BREAKS, check_breaks
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.dynamo.nvext import instance_id
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.openai.chat_response import ID_PREFIX
from lockstep.render import Renderer
from lockstep.render.messages import Plain
from lockstep.render.thought import with_thought
from lockstep.render.tool_grammar import tool_grammar
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest, PromptTooLong, UnsupportedField
from lockstep.tokens.grammar import Grammar


class TurnOpener:
    """Opens the turns of one dialect's requests."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._variants = RendererVariants()

    async def open(
        self,
        http: Request,
        chat: ChatRequest,
        *,
        clamp: bool = False,
        found_tools: Sequence[Plain] = (),
    ) -> GatewayTurn:
        """Return the turn of a request, ready for `sample_turn` or `TurnStream`.

        With `clamp`, a token limit that exceeds what the prompt leaves of the context is lowered to
        it, and the header x-lockstep-max-tokens says so. `found_tools` may be called too; the
        messages describe them. Raises BadRequest, UnknownModel, PromptTooLong and PrefixBreak.
        """
        # Before anything can fail: error responses carry the id.
        received, client_id = time(), request_id(http, chat.request_id)
        model = await self._context.models.resolve(chat.model, caller_of(http).tenant)
        if tracing.active is not None:
            tracing.active.start_turn("chat", model.name, session_id(http))
        renderer = await self._context.models.renderer()
        if chat.sets_template_variables:
            renderer = await self._variants.get(chat, renderer)
        limit, size = model.max_model_len, body_bytes(http)
        # Before the session is joined: counting megabytes of text must not begin one.
        if limit is not None and size > CHARACTERS_PER_TOKEN * limit:
            try:
                await check_chat_fits(chat, renderer, limit)
            except PromptTooLong as error:
                raise name_harness(error, http, chat.messages) from None
        session = await join_session(http, self._context, renderer)
        # Other turns of the session may be planned or stored from here to the commit: a plan names
        # the turn it follows, so that each becomes a branch of its own.
        plan = await plan_prompt(chat, renderer, session)
        if limit is not None and (count := len(plan.prompt_ids)) >= limit:
            too_long = PromptTooLong.of(count, limit, param="messages")
            raise name_harness(too_long, http, chat.messages)
        request = _worker_request(chat, plan.prompt_ids, model.name, renderer, client_id, http)
        if session is None and request.support is None:
            request = replace(request, support=False)
        if session is not None and session.strict:
            # One sample holds one temperature, logprob mode and adapter. A session that may fork
            # splits such a branch into several samples; a strict one rejects the turn.
            check_comparable(
                plan.parent,
                temperature=request.sampling.temperature,
                logprob_mode=request.sampling.logprob_mode,
                adapter=model.adapter,
            )
        headers: dict[str, str] = {}
        if clamp:
            request, headers = _clamp_max_tokens(request, limit)
        if session is not None:
            room = None if limit is None else max(limit - len(request.prompt_ids), 0)
            sampling = await session.reserve(request.sampling, room)
            if sampling is not request.sampling:
                request = replace(request, sampling=sampling)
                headers["x-lockstep-max-tokens"] = str(sampling.max_tokens)
        return GatewayTurn(
            id=client_id.removeprefix(ID_PREFIX),
            chat=chat,
            request=request,
            affinity=Affinity.of(
                request.prompt_ids,
                # Turns of a session go to the worker that has their prefix cached.
                session=session_id(http) or chat.session_id,
                salt=request.cache_salt,
                adapter=model.adapter,
                worker=None if chat.nvext is None else self._pinned_worker(chat.nvext.pinned),
            ),
            renderer=renderer,
            session=session,
            plan=plan,
            model=model.name,
            received=received,
            max_model_len=limit,
            headers=headers,
            found_tools=tuple(found_tools),
            origin=origin_of(http, chat.messages),
        )

    def _pinned_worker(self, pinned: str | None) -> str | None:
        """Return the worker that nvext.backend_instance_id names, by its id or its integer."""
        if pinned is None:
            return None
        names = [worker.id for worker in self._context.pool.workers]
        for name in names:
            if pinned in (name, str(instance_id(name))):
                return name
        listed = ", ".join(f"{instance_id(name)} ({name})" for name in names[:20])
        raise BadRequest(
            f"nvext.backend_instance_id is {pinned}: no such worker; there are {listed or 'none'}",
            param="nvext.backend_instance_id",
        )


async def join_session(
    http: Request, context: GatewayContext, renderer: Renderer
) -> Session | None:
    """Open the session that a request joins; return None if it names none.

    Raises BadRequest when X-Session-Breaks is neither strict nor fork, and as `Sessions.open`.
    """
    header = http.headers.get("x-session-breaks")
    breaks = GATEWAY_BREAKS if header is None else check_breaks(header, "X-Session-Breaks")
    name = session_id(http)
    if name is None:
        return None
    # The key of a session that is gone must not begin another one without its terms.
    begun = caller_of(http).session is not None
    return await context.sessions.open(name, renderer, breaks=breaks, begun=begun)


def _clamp_max_tokens(
    request: GenerateRequest, max_model_len: int | None
) -> tuple[GenerateRequest, dict[str, str]]:
    """Return the request with a token limit that fits the context, and the header that says so."""
    limit = request.sampling.max_tokens
    left = None if max_model_len is None else max_model_len - len(request.prompt_ids)
    if limit is None or left is None or not 0 < left < limit:
        return request, {}
    sampling = replace(request.sampling, max_tokens=left)
    return replace(request, sampling=sampling), {"x-lockstep-max-tokens": str(left)}


def _worker_request(
    chat: ChatRequest,
    prompt_ids: Sequence[int],
    model: str,
    renderer: Renderer,
    client_id: str,
    http: Request,
) -> GenerateRequest:
    caller = caller_of(http)
    name = caller.request_id(client_id)
    sampling = chat.sampling(renderer.stop_token_ids)
    # Tools alone may need a grammar too: of required calls, or of at most one call.
    if chat.tools or sampling.grammar is not None:
        grammar = _grammar(chat, sampling, prompt_ids, renderer)
        if grammar is not sampling.grammar:
            sampling = replace(sampling, grammar=grammar)
    return GenerateRequest(
        prompt_ids=prompt_ids,
        sampling=sampling,
        model=model,
        request_id=name,
        cache_salt=caller.cache_salt(chat.salt),
        priority=chat.rank,
        experts_start=chat.experts_start,
        experts_skipped=chat.routed_experts_prompt_start,
        # A session stores them wherever they cannot be computed again.
        support=bool(chat.return_sampling_mask) or TOKENS_HEADER in http.headers or None,
        weight_version=chat.weight_version,
        min_weight_version=chat.min_weight_version,
        headers=caller.headers(name),
    )


def _grammar(
    chat: ChatRequest, sampling: Sampling, prompt_ids: Sequence[int], renderer: Renderer
) -> Grammar | None:
    """Return the grammar of the whole reply: its content, its tool calls and its thinking."""
    outputs = chat.structured_outputs
    grammar = tool_grammar(
        renderer,
        chat.tools,
        chat.tool_choice,
        parallel=chat.parallel_tool_calls is not False,
        content=sampling.grammar,
        whitespace=None if outputs is None else outputs.whitespace,
    )
    if grammar is None:
        return None
    if chat.continues:
        # The engine would apply the grammar from its start, to the middle of a message.
        raise UnsupportedField(
            "continue_final_message cannot be used with a schema or a required tool call, which "
            "apply from the first token of a message on: leave one of them out",
            param="continue_final_message",
        )
    return with_thought(renderer, prompt_ids, grammar)
