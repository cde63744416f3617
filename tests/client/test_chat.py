"""Conversations over a real worker: token-exact, whole or not at all, and honest about aborts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import lockstep
from lockstep.client import Turn
from lockstep.tokens import errors
from tests.processes import WorkerProcess

CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


async def tool_turn(policy: lockstep.Policy, **options: Any) -> tuple[lockstep.Chat, Turn]:
    """A conversation whose first turn is a tool call (the model makes one in about half)."""
    for seed in range(60):
        chat = policy.chat(seed=seed, call_tools=[CALC], **options)
        turn = await chat.send("What is 417 + 86?")
        if turn.tool_calls:
            return chat, turn
    raise AssertionError("no tool call in 60 conversations")


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F19")
@pytest.mark.failure_mode("F44")
async def test_a_three_turn_tool_conversation_scores_again_bit_for_bit(
    policy: lockstep.Policy,
) -> None:
    chat, turn = await tool_turn(policy)
    assert turn.finish == "tool_calls"
    assert turn.tool_calls[0].name == "calc"
    assert len(turn.logprobs) == len(turn.token_ids)
    second = await chat.send_tool_results("503")
    third = await chat.send("What is 12 * 7?")
    assert (second.bridged, third.bridged) == (True, True)
    sample = chat.sample()
    assert sample.breaks == ()
    assert sample.token_ids == third.prompt_ids + third.token_ids
    assert sum(sample.sampled_mask) == sum(len(t.token_ids) for t in (turn, second, third))
    scores = await policy.score(sample.token_ids)
    pairs = zip(sample.logprobs, scores.logprobs, sample.sampled_mask, strict=True)
    assert all(mine == theirs for mine, theirs, sampled in pairs if sampled)
    assert scores.version == "default"


async def test_every_prompt_starts_with_all_ids_before_it(policy: lockstep.Policy) -> None:
    chat = policy.chat(system="You reverse strings.", temperature=1.0)
    before: list[int] = []
    for text in ("Reverse: 40213", "Reverse: 123", "Reverse: 9876"):
        turn = await chat.send(text)
        assert turn.prompt_ids[: len(before)] == before
        before = turn.prompt_ids + turn.token_ids
    assert chat.sample().token_ids == before


@pytest.mark.failure_mode("F02")
async def test_an_edited_history_is_refused_or_forked(policy: lockstep.Policy) -> None:
    strict = policy.chat()
    await strict.send("Reverse: 12")
    strict.messages[1] = {"role": "assistant", "content": "something else"}
    with pytest.raises(errors.PrefixBreak) as caught:
        await strict.send("Reverse: 34")
    assert caught.value.cause == "edited_history"
    fork = policy.chat(breaks="fork")
    await fork.send("Reverse: 12")
    fork.messages[1] = {"role": "assistant", "content": "something else"}
    turn = await fork.send("Reverse: 34")
    assert (turn.bridged, turn.cause) == (False, "edited_history")
    assert [sample.breaks for sample in fork.samples()] == [(), ("edited_history",)]
    assert fork.break_counts == {"edited_history": 1}
    # What a branch is and how much it counts can be chosen, as with sessions of a gateway.
    (main,) = fork.samples(kinds=["main"])
    assert (main.kind, main.breaks) == ("main", ())
    assert sum(sample.weight for sample in fork.samples(weights="session")) == pytest.approx(1.0)
    assert [sample.trained_in != () for sample in fork.samples(dedupe=False)] == [False, False]
    for bad in ({"kinds": ["mains"]}, {"weights": "tokens"}):
        for chat in (fork, policy.chat()):
            with pytest.raises(errors.BadRequest):
                chat.samples(**bad)


async def test_a_turn_that_fails_leaves_the_conversation_as_it_was(
    policy: lockstep.Policy,
) -> None:
    chat = policy.chat()
    await chat.send("Reverse: 12")
    messages, sample = list(chat.messages), chat.sample()
    with pytest.raises(errors.PromptTooLong):
        await chat.send("x y z " * 2000)
    with pytest.raises(errors.BadRequest):
        await chat.send("Reverse: 34", temprature=1.0)
    assert chat.messages == messages
    assert chat.sample() == sample
    assert (await chat.send("Reverse: 34")).bridged


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F12")
async def test_an_aborted_turn_is_kept_not_trained_on_and_continued(
    policy: lockstep.Policy, worker: WorkerProcess
) -> None:
    chat = policy.chat(max_tokens=600, min_tokens=600, temperature=1.0, logprob_mode="raw")
    sending = asyncio.create_task(chat.send("Reverse: 40213"))
    while not (await worker.control("liveness_probe"))[1]["running"]:
        await asyncio.sleep(0.005)
    await worker.control("pause_generation", mode="abort")
    await worker.control("resume_generation")
    turn = await sending
    assert turn.finish == "abort"
    partial = list(turn.token_ids)
    aborted = chat.sample()
    assert (aborted.aborts, any(aborted.sampled_mask)) == (1, False)
    assert sum(chat.sample(train_aborted=True).sampled_mask) == len(partial)
    whole = await chat.continue_(max_tokens=40, min_tokens=40)
    assert whole.prompt_ids[-len(partial) :] == partial or not partial
    assert whole.token_ids[: len(partial)] == partial
    assert len(whole.token_ids) == len(partial) + 40
    sample = chat.sample()
    assert (sample.aborts, sum(sample.sampled_mask)) == (0, len(whole.token_ids))
    scores = await policy.score(sample.token_ids)
    pairs = zip(sample.logprobs, scores.logprobs, sample.sampled_mask, strict=True)
    assert all(mine == theirs for mine, theirs, sampled in pairs if sampled)
    with pytest.raises(errors.Conflict):
        await chat.continue_()


@pytest.mark.failure_mode("F21")
async def test_a_turn_cut_by_length_is_closed_with_tokens_nobody_sampled(
    policy: lockstep.Policy,
) -> None:
    chat = policy.chat(max_tokens=3, min_tokens=3)
    first = await chat.send("Reverse: 40213")
    assert first.finish == "length"
    second = await chat.send("Reverse: 12")
    assert second.bridged
    sample = chat.sample()
    closing = len(first.prompt_ids) + len(first.token_ids)
    assert sample.token_ids[closing] in policy.renderer().stop_token_ids
    assert sample.sampled_mask[closing] is False


async def test_tool_results_must_answer_every_call(policy: lockstep.Policy) -> None:
    chat, turn = await tool_turn(policy)
    with pytest.raises(errors.BadRequest, match="2 results came for 1"):
        await chat.send_tool_results(["1", "2"])
    with pytest.raises(errors.BadRequest, match="expected"):
        await chat.send_tool_results({"nobody": "1"})
    second = await chat.send_tool_results({turn.tool_calls[0].id: {"result": 503}})
    assert json.loads(chat.messages[-2]["content"]) == {"result": 503}
    assert second.bridged
    with pytest.raises(errors.Conflict):
        await policy.chat().send_tool_results("1")


async def test_tools_in_the_prompt_are_part_of_the_history(policy: lockstep.Policy) -> None:
    chat = policy.chat(tools=[CALC], breaks="strict")
    turn = await chat.send("What is 417 + 86?")
    assert len(turn.prompt_ids) > 100
    chat.tools = None
    with pytest.raises(errors.PrefixBreak) as caught:
        await chat.send("And 2 + 2?")
    assert caught.value.cause == "tools_changed"


async def test_one_turn_at_a_time(policy: lockstep.Policy) -> None:
    chat = policy.chat(max_tokens=200, min_tokens=200)
    sending = asyncio.create_task(chat.send("Reverse: 1"))
    await asyncio.sleep(0)
    with pytest.raises(errors.Conflict):
        await chat.send("Reverse: 2")
    await sending


@pytest.mark.failure_mode("F47")
async def test_cancelling_a_turn_stops_it_at_the_worker(
    policy: lockstep.Policy, worker: WorkerProcess
) -> None:
    chat = policy.chat(max_tokens=900, min_tokens=900)
    sending = asyncio.create_task(chat.send("Reverse: 1"))
    while not (await worker.control("liveness_probe"))[1]["running"]:
        await asyncio.sleep(0.005)
    sending.cancel()
    async with asyncio.timeout(20):
        while (await worker.control("liveness_probe"))[1]["running"]:
            await asyncio.sleep(0.005)
    assert chat.messages == []
    assert chat.samples() == []
