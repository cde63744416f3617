"""Bad input: rejected with a 4xx and a reason, and the server keeps working."""

from __future__ import annotations

from typing import Any

from lockstep.check.dialect import BEYOND
from lockstep.check.outcome import NotApplicable, require
from lockstep.check.raw import RawReply
from lockstep.check.row import RowGroup
from lockstep.check.target import Target

GROUP = RowGroup("input")
NOT_ASKED = "whether ids are checked could not be asked without risking the server"


async def refuses(target: Target, what: str, ids: Any, **fields: Any) -> str:
    """Return the evidence that a request is rejected and that the next good one is not."""
    reply = await target.send_ids(ids, **fields)
    require(reply.refused, f"{what}: answered {reply.describe()}{_sampled(target, reply)}")
    good = await target.send_ids(target.prompt())
    require(
        good.status == 200, f"{what}: {reply.describe()}; after that a good one: {good.describe()}"
    )
    return f"{what}: {reply.describe()}"


async def refuses_id(target: Target, token: int) -> str:
    """Return the evidence of `refuses` for a prompt with an id outside the vocabulary.

    A server that may die of it is first sent the prompt in a request that it rejects for another
    field. If that rejection is the same as for a good prompt, ids are not checked before they reach
    the model, and the prompt is not sent.
    """
    ids = [*target.prompt(4), token]
    if (fields := target.dialect.rejected) is not None:
        good = await target.send_ids(target.prompt(4), **fields)
        require(good.refused, f"id {token} was not sent: {NOT_ASKED}, {good.describe()}")
        bad = await target.send_ids(ids, **fields)
        require(
            bad.refused and bad.describe() != good.describe(),
            f"id {token} was not sent: the server does not check ids before they reach the model, "
            f"and known versions die of it; a request with it and another fault: {bad.describe()}",
        )
    return await refuses(target, f"id {token}", ids)


def _sampled(target: Target, reply: RawReply) -> str:
    if reply.status != 200:
        return ""
    return f" with ids {target.dialect.ids(reply.fields)[:1]}"


@GROUP.row("empty", "an empty prompt is rejected", "F18")
async def empty(target: Target) -> str:
    return await refuses(target, "no ids", [])


@GROUP.row("negative", "a negative id is rejected", "F18")
async def negative(target: Target) -> str:
    return await refuses_id(target, -1)


@GROUP.row("vocabulary", "an id outside the vocabulary is rejected", "F18")
async def vocabulary(target: Target) -> str:
    return await refuses_id(target, BEYOND)


@GROUP.row("float", "an id that is not an integer is rejected", "F18")
async def fraction(target: Target) -> str:
    evidence = await refuses(target, "id 12.5", [*target.prompt(4), 12.5])
    whole = await target.send_ids([*target.prompt(4), 12.0])
    return f"{evidence}; 12.0 {'too' if whole.refused else 'is read as 12'}"


@GROUP.row("unknown", "an unknown field is rejected", "L0")
async def unknown(target: Target) -> str:
    return await refuses(target, "a misspelt field", target.prompt(), temprature=0.5)


@GROUP.row("overlong", "a prompt that leaves no room for a token is rejected", "F17")
async def overlong(target: Target) -> str:
    length = target.card.max_model_len
    if length is None:
        raise NotApplicable("/v1/models tells no max_model_len: it is not known what is too long")
    ids = [target.prompt()[0]] * length
    return await refuses(target, f"{length} ids where {length} fit", ids)


@GROUP.row("model", "a request for an unknown model is rejected", "F31")
async def model(target: Target) -> str:
    reply = await target.send_ids(target.prompt(), model="no-such-model-is-served")
    require(reply.status == 404, f"an unknown model: expected 404, answered {reply.describe()}")
    return f"an unknown model: {reply.describe()}"
