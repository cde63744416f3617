"""The Vercel AI SDK on its default provider references items of earlier responses by their ids."""

from __future__ import annotations

import pytest

from tests.clients.conftest import NODE, Clients
from tests.clients.rules import ANSWER, NOTHING


@pytest.mark.parametrize("how", ["whole", "stream"])
async def test_a_history_of_references_is_one_exact_sample(
    clients: Clients, session: str, how: str
) -> None:
    result = clients.run("ai_sdk.cjs", how, base=clients.session(session), interpreter=NODE)
    assert (result["answer"], result["last"]) == (ANSWER, NOTHING)
    assert result["references"] > 0
    await clients.exact_sample(session, turns=4)
