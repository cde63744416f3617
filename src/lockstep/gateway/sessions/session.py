"""A session as one request uses it: where its turn belongs, and the turn when it was sampled."""

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
    """A session as one request uses it. Plan and commit with the same one."""

    def __init__(
        self, owner: Sessions, cached: CachedSession, renderer: Renderer, breaks: Breaks
    ) -> None:
        self._owner, self._cached, self._renderer, self._breaks = owner, cached, renderer, breaks

    @property
    def id(self) -> str:
        return self._cached.name

    @property
    def strict(self) -> bool:
        """Whether turns that cannot be in one sample with those before are refused."""
        return self._breaks == "strict"

    async def plan(self, messages: Iterable[Any], tools: Iterable[Any] | None = None) -> PromptPlan:
        """The prompt for these messages, its ids perhaps undecoded; see Ledger.plan.

        Raises what that raises, and TooLarge when the session is at its limit of turns or bytes.
        Limits are checked here and not in `commit`: what was sampled is stored.
        """
        await self._owner.begin_call(self._cached)
        try:
            return await self._cached.ledger.plan_async(
                messages, tools, renderer=self._renderer, breaks=self._breaks, lazy=True
            )
        finally:
            self._owner.count_breaks(self._cached)

    async def plan_ids(self, prompt_ids: Sequence[int]) -> PromptPlan:
        """Where a turn with a prompt of ids belongs; see Ledger.plan_ids. Raises as `plan` does."""
        await self._owner.begin_call(self._cached)
        try:
            return self._cached.ledger.plan_ids(prompt_ids, breaks=self._breaks)
        finally:
            self._owner.count_breaks(self._cached)

    def history(self, request_id: str) -> list[Plain] | None:
        """The messages up to and with the turn of that request; None when it is not here."""
        for node in reversed(self._cached.ledger.nodes):
            if node.request_id == request_id:
                return plain_messages(node.messages())
        return None

    async def continue_(self, node: Node) -> PromptPlan:
        """The prompt that goes on where an aborted turn stopped; see Ledger.continue_."""
        await self._owner.begin_call(self._cached)
        return self._cached.ledger.continue_(node)

    async def commit(self, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]) -> None:
        """Stores every choice of a reply as a branch: all of them, or none.

        Returns when they are in the store. Raises what Ledger.commit raises; Conflict when the
        session was deleted or finished meanwhile; Unavailable when they could not be stored, and
        then the session is as it was before. (A shared store that went away in the very moment may
        turn out to have them.) A caller that is cancelled while it waits stores them too.
        """
        if (tracer := tracing.active) is None:
            await self._owner.store(self._cached, plan, choices)
            return
        with tracer.span("store", {"lockstep.session": self.id}):
            await self._owner.store(self._cached, plan, choices)
