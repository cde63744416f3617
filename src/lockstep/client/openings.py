"""The first prompts of conversations that open alike: planned once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from lockstep.ledger import Ledger, PromptPlan
from lockstep.tokens.errors import LockstepError


class Openings:
    """Plans that are shared; of one event loop, and for as long as this object is kept."""

    def __init__(self) -> None:
        self._plans: dict[bytes, asyncio.Task[PromptPlan]] = {}

    async def plan(
        self, ledger: Ledger, messages: list[Any], tools: Sequence[Any] | None
    ) -> PromptPlan:
        """What `ledger.plan_async` gives for the first turn of a ledger; it raises the same."""
        key = _key(ledger, messages, tools)
        if key is None:
            return await ledger.plan_async(messages, tools)
        planning = self._plans.get(key)
        if planning is None:
            planning = asyncio.create_task(ledger.plan_async(messages, tools))
            self._plans[key] = planning
        try:
            # Shielded: one that is cancelled must not cancel the plan that others wait for.
            return await asyncio.shield(planning)
        except LockstepError:
            # Each finds out for itself: an error is that of one conversation.
            return await ledger.plan_async(messages, tools)


def _key(ledger: Ledger, messages: list[Any], tools: Sequence[Any] | None) -> bytes | None:
    """Everything that decides the plan; None where that cannot be told."""
    try:
        contents = msgspec.json.encode((messages, tools))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return b"%d %s " % (id(ledger.renderer), ledger.breaks.encode()) + contents
