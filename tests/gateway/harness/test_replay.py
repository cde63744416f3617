"""Recorded runs of real agents: where one resent its history, its prompts only grew.

The breaks that are expected are those where the agent itself changed the past: what it sent then
cannot begin with what was sampled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.harness.capture import runs
from tests.gateway.harness.replay import Replay, replaying

pytestmark = pytest.mark.asyncio(loop_scope="module")

BREAKS: dict[str, dict[str, int]] = {
    # Another agent goes on with the same history, under its own instructions and tools.
    "agents-handoff": {"edited_history": 1},
    # The last turn is kept behind a summary of all that came before it.
    "claude-compaction": {"edited_history": 1},
    # The whole history is sent without tools, for a summary.
    "codex-compaction": {"tools_changed": 1},
    # The summary of another call stands where an assistant turn was.
    "opencode-compaction": {"edited_history": 1},
    # Both the request for a summary and what follows it have a prompt of their own.
    "qwen-compaction": {"edited_history": 2},
    # Calls of tools that do not exist, and broken JSON, are text here and never calls.
    "claude-fidelity": {"edited_history": 1},
    "codex-fidelity": {"edited_history": 2},
    "opencode-fidelity-chat": {"edited_history": 2},
    "qwen-fidelity-badjson": {"edited_history": 1},
}
UNGROWN = {
    # What was said before was cut off, so that nobody sampled it whole.
    "claude-cut-stream",
    "codex-cut-stream",
    "opencode-cut-stream",
    # Its arguments are cut in the recording.
    "qwen-memory-sidecall",
}
BRIDGED: dict[str, str] = {
    "claude-basic": "-0++",
    "claude-nested-fork": "00+++++",
    "claude-subagents-toolsearch": "-0+00+++",
    "codex-basic": "0++",
    "codex-known-model": "0++0++",
    "codex-resume-fork": "++",
    "codex-subagents": "0+0+0++++",
    "mini-chat": "0+++",
    "mini-messages": "0+++",
    "mini-responses": "0+++",
    "opencode-chat": "00++",
    "opencode-messages": "00++",
    "opencode-responses": "00++",
    "opencode-subagents": "00+0+0++",
    "qwen-chat": "0++",
    "qwen-messages": "0++",
    "qwen-responses": "0++",
    "qwen-subagent": "0+0++",
}
"""Request by request: + goes on token-exactly, 0 opens a branch, - is no turn."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replay() -> AsyncIterator[Replay]:
    async with replaying() as replay:
        yield replay


@pytest.mark.failure_mode("F57")
@pytest.mark.parametrize("run", runs())
async def test_a_recorded_run_breaks_only_where_the_agent_changed_the_past(
    replay: Replay, run: str
) -> None:
    answers = await replay.run(run, grow=run not in UNGROWN)
    for exchange, response in answers:
        if exchange.reply.status == 200:
            assert response.status_code == 200, response.text
    assert replay.breaks(run) == BREAKS.get(run, {})
    marks = "".join(
        {"true": "+", "false": "0", None: "-"}[response.headers.get("x-lockstep-bridged")]
        for _, response in answers
    )
    assert marks == BRIDGED.get(run, marks)
    if "count-tokens" not in run and "cut-stream" not in run:
        await check_samples(replay, run)


async def check_samples(replay: Replay, run: str) -> None:
    """Every sampled token is trained in one sample, with the logprob that the engine gives it."""
    samples = await replay.samples(run)
    cached = replay.sessions.cache.find(run)
    assert cached is not None
    sampled = sum(len(node.sampled) for node in cached.ledger.nodes)
    assert sum(sum(sample.sampled_mask) for sample in samples) == sampled
