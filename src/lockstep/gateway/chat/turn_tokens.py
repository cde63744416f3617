"""The tokens of a turn beside its message, in any dialect, for clients that train on them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from lockstep.gateway.chat.turn import ChatTurn
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.openai.chat_response import ChatReply
from lockstep.tokens.errors import BadRequest

HEADER = "x-lockstep-tokens"
FIELD = "lockstep"


def check_tokens(http: Request, *, stream: bool | None) -> None:
    """Raises BadRequest for a stream that is to bring tokens: whole responses do."""
    if stream and HEADER in http.headers:
        raise BadRequest(
            f"{HEADER} was sent with stream: true, and tokens come with whole responses: send "
            "stream: false",
            param="stream",
        )


def with_tokens(http: Request, turn: ChatTurn, reply: ChatReply, body: Any) -> Any:
    """`body` as it is, or with the field "lockstep" where the request sent X-Lockstep-Tokens.

    `body` is a response as a struct, or as encoded JSON. The field holds the ids of the prompt and
    of the completion, their logprobs and how those were made, the spans of versions, and whether
    the prompt goes on from the tokens of the turn before.
    """
    if HEADER not in http.headers:
        return body
    completion, sampling = reply.completion, turn.request.sampling
    tokens = {
        "prompt_ids": as_list(turn.request.prompt_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "logprob_mode": completion.logprob_mode,
        "temperature": sampling.temperature,
        "versions": [[span.version, span.start, span.end] for span in completion.versions],
        "bridged": turn.plan is not None and turn.plan.bridged,
        "cause": None if turn.plan is None else turn.plan.cause,
    }
    if isinstance(body, (bytes, bytearray, memoryview)):
        fields = msgspec.json.decode(body)
    else:
        fields = msgspec.json.decode(msgspec.json.encode(body))
    return msgspec.json.encode({**fields, FIELD: tokens})
