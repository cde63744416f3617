"""A session as one request uses it: it plans a turn, and commits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep import tracing
from lockstep.gateway.sessions.cache import CachedSession
from lockstep.ledger import Breaks, Node, PromptPlan
from lockstep.render import Renderer
from lockstep.render.messages import Plain, plain_messages
from lockstep.tokens import Completion

if TYPE_CHECKING:
    from lockstep.gateway.sessions.sessions import Sessions


class Session:
    """A session as one request uses it. Plan and commit with the same object."""

    def __init__(
        self, owner: Sessions, cached: CachedSession, renderer: Renderer, breaks: Breaks
    ) -> None:
        self._owner, self._cached, self._renderer, self._breaks = owner, cached, renderer, breaks

    @property
    def id(self) -> str:
        return self._cached.name

    @property
    def strict(self) -> bool:
        """Whether a turn that cannot be in one sample with the turns before is rejected."""
        return self._breaks == "strict"

    async def plan(self, messages: Iterable[Any], tools: Iterable[Any] | None = None) -> PromptPlan:
        """Return the prompt for these messages, whose ids may be undecoded; see Ledger.plan.

        Raises what that raises, and TooLarge when the session is at its limit of turns or bytes.
        Limits are checked here and not in `commit`, which stores every turn that was sampled.
        """
        await self._owner.begin_call(self._cached)
        try:
            return await self._cached.ledger.plan_async(
                messages, tools, renderer=self._renderer, breaks=self._breaks, lazy=True
            )
        finally:
            self._owner.count_breaks(self._cached)

    async def plan_ids(self, prompt_ids: Sequence[int]) -> PromptPlan:
        """Return the plan for a prompt of ids; see Ledger.plan_ids. Raises what `plan` raises."""
        await self._owner.begin_call(self._cached)
        try:
            return self._cached.ledger.plan_ids(prompt_ids, breaks=self._breaks)
        finally:
            self._owner.count_breaks(self._cached)

    def history(self, request_id: str) -> list[Plain] | None:
        """Return the messages up to and with the turn of a request; None if it is not here."""
        for node in reversed(self._cached.ledger.nodes):
            if node.request_id == request_id:
                return plain_messages(node.messages())
        return None

    async def continue_(self, node: Node) -> PromptPlan:
        """Return the prompt that continues an aborted turn; see Ledger.continue_."""
        await self._owner.begin_call(self._cached)
        return self._cached.ledger.continue_(node)

    async def commit(self, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]) -> None:
        """Store every choice of a reply as a branch: all of them, or none.

        They are durable when this returns. Raises what Ledger.commit raises; Conflict when the
        session was deleted or finished in the meantime; Unavailable when they could not be stored,
        and then the session is unchanged. (If a shared store fails during the commit itself, it
        may turn out to have them.) Cancelling the caller does not undo the write.
        """
        if (tracer := tracing.active) is None:
            await self._owner.store(self._cached, plan, choices)
            return
        with tracer.span("store", {"lockstep.session": self.id}):
            await self._owner.store(self._cached, plan, choices)
