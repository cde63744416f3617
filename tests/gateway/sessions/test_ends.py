"""How a session ended is noted once, also where its last call failed, and survives a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.gateway.sessions.sessions import Sessions
from lockstep.render import Renderer
from lockstep.storage.sqlite.sessions import SqliteSessionStore
from lockstep.tokens.errors import Forbidden
from tests.gateway.sessions.test_sessions import QUESTION, renderer, say

__all__ = ["renderer"]


async def test_an_end_by_the_budget_survives_a_restart(renderer: Renderer, tmp_path: Path) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        await sessions.keys.mint("a", max_calls=1)
        await say(await sessions.open("a", renderer), renderer, [QUESTION], "one")
        ended = (await sessions.info("a")).ended
        assert ended is not None
        assert ended.by == "calls"
    async with Sessions(SqliteSessionStore(path)) as sessions:
        assert (await sessions.info("a")).ended == ended
        assert (await sessions.page())[0].ended == ended


async def test_a_last_call_that_failed_shows_the_end_at_the_next(
    renderer: Renderer, tmp_path: Path
) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        await sessions.keys.mint("a", max_calls=1)
        session = await sessions.open("a", renderer)
        await session.plan([QUESTION])
        # It may still be answered: the session has not ended.
        assert (await sessions.info("a")).ended is None
        with pytest.raises(Forbidden, match="budget is 1"):
            await session.plan([QUESTION])
        ended = (await sessions.info("a")).ended
        assert ended is not None
    async with Sessions(SqliteSessionStore(path)) as sessions:
        assert (await sessions.info("a")).ended == ended
