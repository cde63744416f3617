"""POST /v1/responses: OpenAI's newer dialect in front of a fleet, in the same sessions as chat."""

from __future__ import annotations

from time import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep.gateway.callers import caller_of, owner_of, request_id
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.openapi.route_doc import RouteDoc
from lockstep.gateway.responses.references import (
    referenced_ids,
    session_items,
    with_references,
)
from lockstep.gateway.responses.stored import StoredResponses
from lockstep.gateway.responses.translate import (
    TranslatedResponses,
    translate,
    without_instructions,
)
from lockstep.gateway.responses.write import (
    ResponseStream,
    empty_response,
    ended_response,
    failed_events,
    output_items,
)
from lockstep.gateway.turn.context_limit import check_characters
from lockstep.gateway.turn.open import TurnOpener, join_session
from lockstep.gateway.turn.prompt import plan_prompt
from lockstep.gateway.turn.sample import TurnStream, sample_turn
from lockstep.gateway.turn.template_variables import takes_inner_system
from lockstep.gateway.turn.turn import check_tokens_header, with_tokens
from lockstep.http.handlers import EventStream, json_response
from lockstep.http.http_request import body_bytes, read_body
from lockstep.http.off_loop import is_large_json, off_loop
from lockstep.protocol.common.error_body import error_body
from lockstep.protocol.openai.chat_decode import check_chat
from lockstep.protocol.openai.chat_response import ChatReply
from lockstep.protocol.openai.responses_request import ResponsesRequest, decode_responses
from lockstep.protocol.openai.responses_response import (
    DeletedResponse,
    InputTokens,
    ResponseObject,
)
from lockstep.render import Renderer
from lockstep.render.messages import Plain
from lockstep.tokens.errors import BadRequest, PromptTooLong

ROUTE_DOCS = (
    RouteDoc(
        "POST", "/v1/responses", ResponsesRequest, ResponseObject,
        "OpenAI's responses, in the same sessions as chat.", streams=True,
    ),
    RouteDoc(
        "POST", "/v1/responses/input_tokens", ResponsesRequest, InputTokens,
        "The number of prompt tokens of a request; nothing is generated or stored.",
    ),
    RouteDoc("GET", "/v1/responses/{response_id}", None, ResponseObject, "A stored response."),
    RouteDoc(
        "DELETE", "/v1/responses/{response_id}", None, DeletedResponse,
        "Deletes a stored response; turns in a session stay.",
    ),
)  # fmt: skip
PREFIX = "resp_"
EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
"""Template variables that set how much a model thinks, and that turn thinking off."""


class ResponsesRoutes:
    """POST /v1/responses, and stored responses by their id."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._opener = TurnOpener(context)
        self._stored = StoredResponses()
        self.routes = [
            HttpRoute("/v1/responses", self.create, methods=["POST"]),
            HttpRoute("/v1/responses/input_tokens", self.count, methods=["POST"]),
            HttpRoute("/v1/responses", self.upgrade, methods=["GET"]),
            HttpRoute("/v1/responses/{response_id}", self.retrieve, methods=["GET"]),
            HttpRoute("/v1/responses/{response_id}", self.delete, methods=["DELETE"]),
        ]

    async def create(self, http: Request) -> Response:
        """Return the response to a request, whole or streamed."""
        client_id = request_id(http)
        body = await read_body(http, decode_responses, self._context.limits)
        check_tokens_header(http, stream=body.stream)
        empty = empty_response(body, PREFIX + client_id, int(time()))
        try:
            return await self._create(http, body, empty)
        except PromptTooLong as error:
            if not body.stream:
                raise
            # Codex ends a run on this event, but retries on an HTTP status.
            return EventStream(failed_events(empty, error), client_id, done=b"")

    async def _create(
        self, http: Request, body: ResponsesRequest, empty: ResponseObject
    ) -> Response:
        translated = await self._translate(http, body)
        turn = await self._opener.open(http, translated.chat, clamp=True)
        if translated.accepted:
            turn.headers["x-lockstep-accepted"] = ",".join(sorted(set(translated.accepted)))
        owner = owner_of(http)

        def store(response: ResponseObject, reply: ChatReply) -> None:
            if body.store is not False:
                self._stored.add(owner, response, [*translated.items, dict(reply.message)])

        response: Response
        if body.stream:
            parts = await TurnStream.started(http, turn, self._context.pool)
            stream = ResponseStream(empty, turn, parts, translated.tools, store)
            response = EventStream(
                stream.events(), http.state.request_id, done=b"", open_end=turn.open_end
            )
        else:
            _, (reply,) = await sample_turn(http, turn, self._context.pool)
            output = output_items(turn.id, reply.message, translated.tools)
            ended = ended_response(empty, turn, reply, output)
            store(ended, reply)
            response = json_response(with_tokens(http, turn, reply, ended))
        response.headers["x-request-id"] = http.state.request_id
        response.headers.update(turn.headers)
        return response

    async def count(self, http: Request) -> Response:
        """Return the number of prompt tokens of a request; nothing is generated or stored."""
        request_id(http)
        body = await read_body(http, decode_responses, self._context.limits)
        await self._context.models.resolve(body.model, caller_of(http).tenant)
        chat = (await self._translate(http, body)).chat
        check_characters(chat.messages, self._context.limits)
        plan = await plan_prompt(chat, await self._context.models.renderer(), None)
        return json_response(InputTokens(input_tokens=len(plan.prompt_ids)))

    async def upgrade(self, _: Request) -> Response:
        """Reject a WebSocket with the status that makes Codex fall back to HTTP."""
        why = "responses are not served over a WebSocket here: send POST /v1/responses"
        return json_response(error_body(426, why, "upgrade_required"), 426)

    async def retrieve(self, http: Request) -> Response:
        """Return a stored response."""
        return json_response(
            self._stored.require(owner_of(http), http.path_params["response_id"]).body
        )

    async def delete(self, http: Request) -> Response:
        """Delete a stored response; turns in a session stay."""
        name = http.path_params["response_id"]
        self._stored.delete(owner_of(http), name)
        return json_response(DeletedResponse(id=name))

    async def _translate(self, http: Request, body: ResponsesRequest) -> TranslatedResponses:
        renderer = await self._context.models.renderer()
        body = await self._resolve_references(http, body, renderer)
        before = await self._previous_messages(http, body, renderer)
        large, inner = is_large_json(body_bytes(http)), takes_inner_system(renderer)
        translated = await off_loop(large, translate, body, before, inner_system=inner)
        _set_effort(translated, body, renderer)
        check_chat(translated.chat)
        return translated

    async def _resolve_references(
        self, http: Request, body: ResponsesRequest, renderer: Renderer
    ) -> ResponsesRequest:
        """Return the request with the items that it references by id.

        In a session they are also found in its turns, after a restart or by another gateway.
        """
        names = referenced_ids(body.input)
        if isinstance(body.input, str) or not names:
            return body
        owner = owner_of(http)
        by_id = {name: self._stored.find_item(owner, name) for name in names}
        if None in by_id.values():
            session = await join_session(http, self._context, renderer)
            if session is not None:
                items = session_items(session.replies(), names, caller_of(http).request_id)
                by_id |= {name: item for name, item in items.items() if by_id[name] is None}
        return msgspec.structs.replace(body, input=with_references(body.input, by_id))

    async def _previous_messages(
        self, http: Request, body: ResponsesRequest, renderer: Renderer
    ) -> list[Plain]:
        """Return the conversation of the response that the request continues.

        In a session it is also found by its turn, after a restart or by another gateway.
        """
        name = body.previous_response_id
        if name is None:
            return []
        stored = self._stored.find(owner_of(http), name)
        if stored is not None:
            return stored.messages
        session = await join_session(http, self._context, renderer)
        turn_id = caller_of(http).request_id(name.removeprefix(PREFIX))
        messages = None if session is None else session.history(turn_id)
        if messages is None:
            raise BadRequest(
                f"Previous response with id '{name}' not found.", param="previous_response_id"
            )
        return without_instructions(messages, body.instructions)


def _set_effort(
    translated: TranslatedResponses, body: ResponsesRequest, renderer: Renderer
) -> None:
    effort = None if body.reasoning is None else body.reasoning.effort
    source = renderer.template.source
    if effort is not None and EFFORT in source:
        translated.chat.reasoning_effort = effort
        translated.accepted.remove("reasoning.effort")
    elif effort == "none" and SWITCH in source:
        translated.chat.chat_template_kwargs = {SWITCH: False}
        translated.accepted.remove("reasoning.effort")
