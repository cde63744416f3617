"""Scores of a probe over the data side of a server, for admin drivers without a route for it."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import uuid4

from lockstep.backends.admin_client import AdminClient, CallBudget
from lockstep.backends.transport import Transport
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadLogprob


async def score(
    client: AdminClient,
    transport: Transport,
    token_ids: Sequence[int],
    adapter: str | None,
    budget: CallBudget,
) -> list[float]:
    """Return the logprobs of every token after the first, from a server that is not paused."""
    request = GenerateRequest(
        prompt_ids=list(token_ids),
        sampling=Sampling(max_tokens=1, logprobs=0, prompt_logprobs=0),
        model=adapter,
        # A fresh salt: a probe must not be served from prefixes cached under older weights.
        cache_salt=uuid4().hex,
        timeout=budget.attempt,
    )

    async def look_up() -> None:
        return None  # scoring changes nothing: it may be repeated

    (completion,) = await client.exactly_once(
        "probe", lambda: transport.generate(request), look_up, budget
    )
    scores = [
        None if entry is None else entry.logprob for entry in completion.prompt_logprobs or ()
    ]
    if None in scores[1:]:
        raise BadLogprob(f"{client.url} probe: a prompt token has no logprob")
    return [value for value in scores[1:] if value is not None]
