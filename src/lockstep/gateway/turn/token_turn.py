"""A turn whose prompt is token ids, and the session that stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.gateway.sessions.cache import Session
from lockstep.ledger import PromptPlan
from lockstep.ledger.branch_sample import check_comparable
from lockstep.tokens import Completion, Sampling

UNREAD: dict[str, Any] = {"role": "assistant", "content": ""}
"""The message stored for a reply that is not parsed: such a turn is found by its ids."""


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """The place in a session where the completions of one prompt are stored."""

    session: Session
    plan: PromptPlan
    sampling: Sampling
    """The sampling of the request, with a token limit that the session's budget covers."""

    @classmethod
    async def of(
        cls,
        session: Session | None,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        adapter: str | None,
        max_model_len: int | None = None,
    ) -> TokenTurn | None:
        """Return the turn of a prompt in a session; None without a session.

        Raises what Session.plan_ids raises, and Conflict where a strict session cannot have it in
        one sample with the turns before.
        """
        if session is None:
            return None
        plan = await session.plan_ids(prompt_ids)
        if session.strict:
            check_comparable(
                plan.parent,
                temperature=sampling.temperature,
                logprob_mode=sampling.logprob_mode,
                adapter=adapter,
            )
        room = None if max_model_len is None else max(max_model_len - len(prompt_ids), 0)
        return cls(session, plan, await session.reserve(sampling, room))

    async def commit(self, completions: Sequence[Completion]) -> None:
        """Store the choices, before the client gets the end of the response; see Session.commit."""
        await self.session.commit(self.plan, [(completion, UNREAD) for completion in completions])
