"""The part of a streamed turn that arrived before it was cut, as an aborted turn to store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lockstep.gateway.turn.progress import ChoiceProgress
from lockstep.gateway.turn.turn import GatewayTurn, reply_of
from lockstep.protocol.common.response import UNKNOWN_VERSION
from lockstep.protocol.openai.chat_response import ChatReply
from lockstep.tokens import Completion, VersionSpan
from lockstep.tokens.errors import ContractError, LockstepError, MissingFinish

log = logging.getLogger(__name__)


def is_cut(error: BaseException) -> bool:
    """Return whether what arrived before this error is to be kept: the client disconnected, or the
    worker failed. Tokens of a response that broke the contract are not to be trusted."""
    if isinstance(error, ContractError):
        return isinstance(error, MissingFinish)
    return isinstance(error, LockstepError | asyncio.CancelledError | GeneratorExit)


def keep_cut(
    turn: GatewayTurn,
    choices: Sequence[ChoiceProgress],
    finished: Mapping[int, Completion],
    version: str | None,
    cause: BaseException,
) -> None:
    """Start to store what arrived of a turn, so that the agent can continue from it.

    `finished` are the choices that ended before the cut, by their index; `version` is that of
    tokens whose stream did not tell theirs. Turns without a session or a token are not stored. The
    next plan of the session waits for the write.
    """
    session = turn.session
    if session is None or not any(choice.token_ids for choice in choices):
        return
    try:
        replies = [
            _reply(turn, finished.get(at) or _completion(turn, at, choice, version))
            for at, choice in enumerate(choices)
        ]
        session.commit_cut(turn.plan, turn.stored(replies))
    except LockstepError as error:
        log.warning("session %r: a cut turn is not stored: %s", session.id, error.message)
        return
    log.info(
        "session %r: turn cut after %d tokens, kept as aborted: %s",
        session.id, sum(len(choice.token_ids) for choice in choices), cause or "client left",
    )  # fmt: skip


def _completion(
    turn: GatewayTurn, index: int, choice: ChoiceProgress, version: str | None
) -> Completion:
    """Return what arrived of a choice. Raises ContractError where logprobs did not arrive with the
    tokens, as some workers send them at the end only."""
    request, made = turn.request, choice.made
    mode = request.sampling.logprob_mode if made is None else made.logprob_mode
    adapter = None if made is None else made.adapter
    return Completion(
        token_ids=list(choice.token_ids),
        logprobs=list(choice.logprobs),
        prompt_ids=request.prompt_ids,
        finish="abort",
        # The version that a fleet accepts is that of weights alone.
        versions=_spans(choice, (version if adapter is None else None) or UNKNOWN_VERSION),
        logprob_mode=mode or "raw",
        temperature=request.sampling.temperature,
        shaping=request.sampling.shaping(),
        index=index,
        request_id=request.request_id or "",
        worker=None if made is None else made.worker,
        adapter=adapter,
        allow_nonfinite=request.allow_nonfinite,
    )


def _spans(choice: ChoiceProgress, version: str) -> tuple[VersionSpan, ...]:
    count = len(choice.token_ids)
    if not count:
        return ()
    starts = [(name or version, start) for name, start in choice.versions] or [(version, 0)]
    ends = [*starts, (version, count)]
    return tuple(VersionSpan(name, start, end) for (name, start), (_, end) in pairwise(ends))


def _reply(turn: GatewayTurn, completion: Completion) -> ChatReply:
    parsed = turn.renderer.parse(
        completion.token_ids,
        turn.tools,
        prompt_ids=turn.request.prompt_ids,
        verbatim=turn.chat.continues,
    )
    return reply_of(completion, parsed)
