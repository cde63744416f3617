"""Recorded requests that follow a cut stream: what the agent kept is the turn that was cut."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from lockstep.scripted.script import Rule, ScriptedCall, ScriptedError
from tests.gateway.harness.capture import load
from tests.gateway.harness.replay import Replay, replaying

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.failure_mode("F98")]
KEPT = {"claude-cut-stream": 2, "codex-cut-stream": 2, "opencode-cut-stream": 1}
"""Messages or items at the end of the recorded request that follow the cut."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replay() -> AsyncIterator[Replay]:
    async with replaying() as replay:
        yield replay


def cut_rule(replay: Replay, items: list[Any]) -> Rule:
    """What the engine says until it fails: a little more than what the agent kept."""
    call = next((item for item in items if item.get("type") == "function_call"), None)
    if call is None:
        text = items[0]["content"][0]["text"]
        kept, whole = Rule(say=text), {"say": f"{text} and nothing else, of all there is."}
    else:
        first = ScriptedCall(call["name"], json.loads(call["arguments"]))
        kept, whole = Rule(calls=[first]), {"calls": [first, first]}
    end = len(replay.reply_ids(kept)) + 3
    return Rule(**whole, error=ScriptedError(status=500, after_tokens=end), times=1)


@pytest.mark.parametrize("run", KEPT)
async def test_a_recorded_request_after_a_cut_continues_the_cut_turn(
    replay: Replay, run: str
) -> None:
    exchange, *_ = load(run)
    url, body = f"/sessions/{run}{exchange.path}", {**exchange.body, "model": "tiny"}
    key = "input" if "input" in body else "messages"
    before, kept = body[key][: -KEPT[run]], body[key][-KEPT[run] :]
    replay.say(cut_rule(replay, kept))
    first = await replay.http.post(url, json={**body, key: before}, headers=exchange.headers)
    assert first.status_code == 200
    events = [json.loads(line[6:]) for line in first.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] not in ("error", "response.failed", "message_stop")
    (given,) = [
        event["item"]["call_id"]
        for event in events
        if event["type"] == "response.output_item.done" and event["item"].get("call_id")
    ] or [None]
    mapped = [{**item, "call_id": given} if "call_id" in item else item for item in kept]
    replay.say(Rule(say="Done."))
    body = {**body, key: [*before, *mapped]}
    second = await replay.http.post(url, json=body, headers=exchange.headers)
    assert second.status_code == 200, second.text
    assert second.headers["x-lockstep-bridged"] == "true"
    assert replay.breaks(run) == {}
    samples = await replay.samples(run, train=True)
    (main,) = [sample for sample in samples if sample.kind == "main"]
    cached = replay.sessions.cache.find(run)
    assert cached is not None
    last = cached.ledger.nodes[-1]
    assert last.parent is not None
    assert sum(main.sampled_mask) == len(last.parent.sampled) + len(last.sampled)
    assert last.parent.finish == "abort"
