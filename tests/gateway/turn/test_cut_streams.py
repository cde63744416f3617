"""A stream that was cut is a turn of its session, which the agent may continue, in any dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from lockstep.ledger import Node
from lockstep.scripted.script import Rule, ScriptedCall, ScriptedError
from tests.gateway.harness.replay import Replay, replaying
from tests.gateway.turn.agents import Agent, Received

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.failure_mode("F98")]
DIALECTS = ("chat", "messages", "responses")
CALLS = [ScriptedCall("shell", {"command": f"echo {at}"}) for at in range(2)]
WHOLE: dict[str, Any] = {"think": "I plan.", "say": "I write two files.", "calls": CALLS}
END = Rule(say="Done.")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replay() -> AsyncIterator[Replay]:
    async with replaying() as replay:
        yield replay


def count(replay: Replay, **reply: Any) -> int:
    """Number of tokens that a reply has."""
    return len(replay.reply_ids(Rule(**reply)))


def nodes(replay: Replay, session: str) -> list[Node]:
    cached = replay.sessions.cache.find(session)
    return [] if cached is None else cached.ledger.nodes


async def cut_turn(replay: Replay, agent: Agent, how: str, tokens: int) -> Received:
    """Stream a turn that ends after that many tokens, by the worker's or by the client's doing."""
    if how == "error":
        error = ScriptedError(status=500, after_tokens=tokens)
        replay.say(Rule(**WHOLE, error=error, times=1))
        return await agent.turn()
    replay.say(Rule(**WHOLE, token_delay=0.02))
    turn = await agent.turn(leave_after=3)
    for _ in range(500):
        if nodes(replay, agent.session):
            return turn
        await asyncio.sleep(0.01)
    raise AssertionError("the turn that the client left was never stored")


async def check(replay: Replay, session: str, *, continued: bool) -> None:
    """Every sampled token is trained once, or masked in a sample that says why."""
    assert replay.breaks(session) == {}
    samples = await replay.samples(session, train=True)
    main, *rest = samples
    assert (main.kind, main.breaks, main.aborts) == ("main", (), 0)
    assert "Done." in replay.renderer.decode(main.token_ids)
    trained = sum(sum(sample.sampled_mask) for sample in samples)
    stored = nodes(replay, session)
    cut, end = stored[0], stored[-1]
    assert cut.finish == "abort"
    assert {span.version for span in cut.versions} == {"default"}
    kept = end.parent
    if not continued:
        assert kept is None
        assert trained == len(end.sampled)
    else:
        assert kept is not None
        assert trained == len(kept.sampled) + len(end.sampled)
        assert end.ids()[: kept.end] == cut.ids()[: kept.end]
    for sample in rest:
        assert (sample.kind, any(sample.sampled_mask)) == ("retry", False)
        assert (sample.evidence or "").startswith("cut; ")


@pytest.mark.parametrize("how", ["error", "left"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_turn_is_trained_up_to_the_call_that_the_agent_executed(
    replay: Replay, dialect: str, how: str
) -> None:
    agent = Agent(replay.http, dialect, f"executed-{dialect}-{how}")
    # Within the second call, of which the client gets nothing.
    tokens = count(replay, **{**WHOLE, "calls": CALLS[:1]}) + 5
    turn = await cut_turn(replay, agent, how, tokens)
    assert (turn.thought, turn.text, len(turn.calls)) == ("I plan.", "I write two files.", 1)
    agent.keep(turn)
    replay.say(END)
    assert (await agent.turn()).text == "Done."
    await check(replay, agent.session, continued=True)
    kept = nodes(replay, agent.session)[-1].parent
    assert kept is not None
    assert replay.renderer.decode(kept.sampled).endswith("</tool_call>")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_turn_is_trained_up_to_the_text_that_the_agent_kept(
    replay: Replay, dialect: str
) -> None:
    agent = Agent(replay.http, dialect, f"half-{dialect}")
    turn = await cut_turn(replay, agent, "error", count(replay, think="I plan.", say="I write"))
    assert turn.text
    assert WHOLE["say"].startswith(turn.text)
    agent.keep(turn, thought=dialect != "chat")
    agent.say("Your response was cut off. Go on.")
    replay.say(END)
    await agent.turn()
    await check(replay, agent.session, continued=True)


@pytest.mark.parametrize("insert", [False, True], ids=["dropped", "blank"])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_turn_that_the_agent_does_not_continue_stays_masked(
    replay: Replay, dialect: str, insert: bool
) -> None:
    agent = Agent(replay.http, dialect, f"dropped-{dialect}-{insert}")
    await cut_turn(replay, agent, "error", count(replay, think="I plan.", say="I write"))
    if insert:
        agent.blank()
    agent.say("Go on.")
    replay.say(END)
    await agent.turn()
    await check(replay, agent.session, continued=False)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_history_that_ends_with_the_cut_turn_goes_on_from_it(
    replay: Replay, dialect: str
) -> None:
    agent = Agent(replay.http, dialect, f"trailing-{dialect}")
    turn = await cut_turn(replay, agent, "error", count(replay, think="I plan.", say="I write"))
    agent.keep(turn)
    replay.say(END)
    await agent.turn()
    await check(replay, agent.session, continued=True)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_worker_that_fails_before_any_content_is_not_noticed(
    replay: Replay, dialect: str
) -> None:
    agent = Agent(replay.http, dialect, f"restarted-{dialect}")
    # The marker that opens the thinking was sampled, and the client has got nothing yet.
    first = Rule(**WHOLE, error=ScriptedError(status=500, after_tokens=1), times=1)
    replay.say(first, END)
    turn = await agent.turn()
    assert (turn.text, turn.ended) == ("Done.", "stop")
    await check(replay, agent.session, continued=False)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_failure_after_content_leaves_the_end_open_for_agents_that_continue(
    replay: Replay, dialect: str
) -> None:
    tokens = count(replay, think="I plan.", say="I write")
    agent = Agent(replay.http, dialect, f"open-{dialect}")
    turn = await cut_turn(replay, agent, "error", tokens)
    assert (turn.text, turn.ended) == ("I write", "")
    (comment,) = [line for line in turn.lines if line.startswith(":")]
    assert "the script wants this request to fail" in comment
    assert "data: [DONE]" not in turn.lines
    sdk = Agent(replay.http, dialect, f"closed-{dialect}", "OpenAI/Python 3.49.0")
    turn = await cut_turn(replay, sdk, "error", tokens)
    assert (turn.text, turn.ended) == ("I write", "error")
