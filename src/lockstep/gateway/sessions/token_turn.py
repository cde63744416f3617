"""A turn whose prompt came as ids, and the session that records it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.gateway.sessions.session import Session
from lockstep.ledger import PromptPlan
from lockstep.ledger.branch_sample import check_comparable
from lockstep.tokens import Completion, Sampling

UNREAD: dict[str, Any] = {"role": "assistant", "content": ""}
"""The message of a reply that nobody parses: the turn is found by its ids."""


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """Where the completions of one prompt will be stored."""

    session: Session
    plan: PromptPlan

    @classmethod
    async def of(
        cls,
        session: Session | None,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        adapter: str | None,
    ) -> TokenTurn | None:
        """The turn of a prompt in this session; None without one.

        Raises what Session.plan_ids raises, and Conflict where a strict session cannot hold it in
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
        return cls(session, plan)

    async def commit(self, completions: Sequence[Completion]) -> None:
        """Stores the choices, before the client sees them whole; see Session.commit."""
        await self.session.commit(self.plan, [(each, UNREAD) for each in completions])
