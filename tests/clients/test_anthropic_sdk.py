"""The anthropic SDK's tool runner sends only its new messages, in a thread of the gateway."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Clients
from tests.clients.rules import ANSWER


@pytest.mark.parametrize("how", ["whole", "stream"])
async def test_a_thread_of_the_tool_runner_is_one_exact_sample(
    clients: Clients, session: str, how: str
) -> None:
    base = clients.session(session).removesuffix("/v1")
    result = clients.run("anthropic_tool_runner", how, base=base)
    assert result["answer"] == ANSWER
    assert result["sent"] == [["create", 1], ["continue", 1], ["continue", 1]]
    await clients.exact_sample(session)
