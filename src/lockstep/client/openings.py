"""Plans of first prompts, shared by conversations with the same opening."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from lockstep.ledger import Ledger, PromptPlan
from lockstep.tokens.errors import LockstepError


class Openings:
    """Cache of shared plans, for one event loop and the lifetime of this object."""

    def __init__(self) -> None:
        self._plans: dict[bytes, asyncio.Task[PromptPlan]] = {}

    async def plan(
        self, ledger: Ledger, messages: list[Any], tools: Sequence[Any] | None
    ) -> PromptPlan:
        """Return the result of `ledger.plan_async` for the first turn of a ledger; raise as it
        does.
        """
        key = _key(ledger, messages, tools)
        if key is None:
            return await ledger.plan_async(messages, tools)
        planning = self._plans.get(key)
        if planning is None:
            planning = asyncio.create_task(ledger.plan_async(messages, tools))
            self._plans[key] = planning
        try:
            # Shielded: cancelling one caller must not cancel the plan that others wait for.
            return await asyncio.shield(planning)
        except LockstepError:
            # Every conversation plans for itself after a failure, so that each raises its own
            # error.
            return await ledger.plan_async(messages, tools)


def _key(ledger: Ledger, messages: list[Any], tools: Sequence[Any] | None) -> bytes | None:
    """Return a key of everything that determines the plan, or None if that is not hashable."""
    try:
        contents = msgspec.json.encode((messages, tools))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return b"%d %s " % (id(ledger.renderer), ledger.breaks.encode()) + contents
