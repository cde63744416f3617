"""Recorded runs of real agents: what each branch is, and which branch it came from."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.harness.capture import load
from tests.gateway.harness.replay import Replay, replaying
from tests.gateway.harness.test_replay import UNGROWN

pytestmark = pytest.mark.asyncio(loop_scope="module")

Expected = dict[int, tuple[str, int | None]]
"""Kind and parent of each branch, by the turn with which it begins."""

SIDE_AND_CHILD: dict[str, Expected] = {
    "agents-chat": {0: ("main", None), 2: ("subagent", 0)},
    "claude-subagents-toolsearch": {0: ("main", None), 2: ("subagent", 0), 3: ("subagent", 0)},
    # It begins with a sub-agent and one of that; the main line comes later, and another child,
    # which goes on with the history of its parent.
    "claude-nested-fork": {
        0: ("subagent", 3),
        1: ("subagent", 0),
        3: ("main", None),
        6: ("subagent", 3),
    },
    "claude-tui-title": {1: ("main", None), 0: ("auxiliary", 1)},
    "codex-known-model": {0: ("main", None), 3: ("subagent", 0)},
    "codex-subagents": {0: ("main", None), 2: ("subagent", 0), 4: ("subagent", 0)},
    "opencode-chat": {1: ("main", None), 0: ("auxiliary", 1)},
    "opencode-messages": {1: ("main", None), 0: ("auxiliary", 1)},
    "opencode-responses": {1: ("main", None), 0: ("auxiliary", 1)},
    "opencode-subagents": {
        1: ("main", None),
        3: ("subagent", 1),
        5: ("subagent", 1),
        0: ("auxiliary", 1),
    },
    "qwen-memory-sidecall": {0: ("auxiliary", None)},
    "qwen-subagent": {0: ("main", None), 2: ("subagent", 0)},
}
COMPACTED: Expected = {0: ("main", None), 3: ("compaction", 0), 2: ("auxiliary", 0)}
FORKED: dict[str, Expected] = {
    "agents-handoff": {0: ("main", None), 3: ("fork", 0)},
    "claude-resume-fork": {0: ("main", None), 4: ("fork", 0)},
    "codex-resume-fork": {0: ("main", None), 4: ("fork", 0)},
    # An answer without a call is left out of the history that it sends next.
    "mini-chat": {0: ("main", None), 3: ("fork", 0)},
}
HARNESSES = {"agents": "openai-agents", "claude": "claude-code", "mini": "OpenAI/Python",
             "qwen": "qwen-code"}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replay() -> AsyncIterator[Replay]:
    async with replaying() as replay:
        yield replay


async def check(replay: Replay, run: str, expected: Expected) -> None:
    await replay.run(run, grow=run not in UNGROWN)
    samples = await replay.sessions.samples(run, weights="session")
    assert {each.branch: (each.kind, each.parent) for each in samples} == expected
    program = run.partition("-")[0]
    assert {each.harness for each in samples} == {HARNESSES.get(program, program)}
    assert all(each.evidence for each in samples)
    assert sum(each.weight for each in samples) == pytest.approx(1.0)
    cached = replay.sessions.cache.find(run)
    assert cached is not None
    for sample in samples:
        # Every turn is trained in the branch that it is of, and nowhere else.
        path = cached.ledger.nodes[sample.turn_index].path()
        own = sum(len(node.sampled) for node in path if node.index >= sample.branch)
        assert sum(sample.sampled_mask) == own


@pytest.mark.failure_mode("F59")
@pytest.mark.parametrize("run", SIDE_AND_CHILD)
async def test_sub_agents_and_side_calls_are_branches_beside_the_main_line(
    replay: Replay, run: str
) -> None:
    await check(replay, run, SIDE_AND_CHILD[run])


@pytest.mark.failure_mode("F58")
@pytest.mark.parametrize("program", ["claude", "codex", "opencode", "qwen"])
async def test_what_follows_a_compaction_is_a_branch_that_names_what_it_replaced(
    replay: Replay, program: str
) -> None:
    await check(replay, f"{program}-compaction", COMPACTED)


@pytest.mark.parametrize("run", FORKED)
async def test_another_way_on_from_one_history_is_a_fork(replay: Replay, run: str) -> None:
    await check(replay, run, FORKED[run])


@pytest.mark.failure_mode("F59")
@pytest.mark.parametrize("run", ["claude-basic", "codex-basic", "opencode-chat", "qwen-chat"])
async def test_a_request_that_is_sent_again_is_one_turn_with_two_attempts(
    replay: Replay, run: str
) -> None:
    first = next(each for each in load(run) if each.method == "POST" and each.body.get("tools"))
    name = f"{run}-again"
    for _ in range(2):
        response = await replay.http.post(
            f"/sessions/{name}{first.path}",
            json={**first.body, "model": "tiny"},
            headers=first.headers,
        )
        assert response.status_code == 200, response.text
    main, retry = await replay.sessions.samples(name)
    assert (main.kind, main.branch, any(main.sampled_mask)) == ("main", 1, True)
    assert (retry.kind, retry.parent, any(retry.sampled_mask)) == ("retry", 1, False)
