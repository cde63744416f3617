"""Conversations that open alike are planned once, and each as it would be alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lockstep.client.openings import Openings
from lockstep.ledger import Ledger
from lockstep.render import Renderer
from lockstep.tokens.errors import BadRequest

HELLO = [{"role": "user", "content": "Reverse: 123"}]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load("tiny")


class Counted(Ledger):
    """Counts what is planned."""

    count = 0

    async def plan_async(self, *args: Any, **options: Any) -> Any:
        Counted.count += 1
        return await super().plan_async(*args, **options)


async def test_conversations_that_open_alike_are_planned_once(renderer: Renderer) -> None:
    openings, Counted.count = Openings(), 0
    ledgers = [Counted(renderer) for _ in range(4)]
    plans = await asyncio.gather(*(openings.plan(each, list(HELLO), None) for each in ledgers))
    assert Counted.count == 1
    assert plans == [Ledger(renderer).plan(HELLO)] * 4


@pytest.mark.parametrize("other", ["messages", "tools", "breaks", "renderer"])
async def test_whatever_differs_is_planned_for_itself(renderer: Renderer, other: str) -> None:
    openings, Counted.count = Openings(), 0
    await openings.plan(Counted(renderer, breaks="strict"), HELLO, None)
    renderer = Renderer.load("tiny", thinking="template") if other == "renderer" else renderer
    ledger = Counted(renderer, breaks="fork" if other == "breaks" else "strict")
    messages = [{"role": "user", "content": "no"}] if other == "messages" else HELLO
    tools = [{"type": "function", "function": {"name": "f"}}] if other == "tools" else None
    plan = await openings.plan(ledger, messages, tools)
    assert Counted.count == 2
    assert plan == Ledger(renderer, breaks=ledger.breaks).plan(messages, tools)


async def test_a_message_that_was_changed_after_it_was_sent_is_another(renderer: Renderer) -> None:
    openings, message = Openings(), {"role": "user", "content": "Reverse: 123"}
    first = await openings.plan(Ledger(renderer), [message], None)
    message["content"] = "Reverse: 456"
    second = await openings.plan(Ledger(renderer), [message], None)
    assert first.prompt_ids != second.prompt_ids


async def test_each_conversation_has_its_own_error(renderer: Renderer) -> None:
    openings, bad = Openings(), [{"role": "nobody", "content": 1}]
    tasks = [openings.plan(Ledger(renderer), bad, None) for _ in range(3)]
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [BadRequest] * 3
    assert len({id(error) for error in errors}) == 3


async def test_one_that_is_cancelled_leaves_the_others_their_plan(renderer: Renderer) -> None:
    openings = Openings()
    tasks = [asyncio.create_task(openings.plan(Ledger(renderer), HELLO, None)) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert (await tasks[1]).prompt_ids == renderer.render(HELLO)
