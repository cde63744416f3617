"""Unmodified agents with a session, and trainers that keep the ids themselves: append only."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from lockstep.render import Renderer
from tests.gateway.chat.chat_server import CHAT, REVERSE, SUM, TOOL, Served, joined
from tests.processes import WorkerProcess


async def calling_seed(served: Served) -> int:
    """A seed with which the model calls the tool."""
    for seed in range(16):
        response = await served.post(messages=SUM, tools=[TOOL], seed=seed, max_tokens=64)
        if response["choices"][0]["finish_reason"] == "tool_calls":
            return seed
    raise AssertionError("the model never called the tool")


@pytest.mark.failure_mode("F01")
@pytest.mark.failure_mode("F19")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_agent_of_three_turns_stays_bridged_with_the_sdk_s_own_objects(
    served: Served, stream: bool
) -> None:
    seed = await calling_seed(served)
    client = served.openai.with_options(default_headers={"X-Session-ID": f"agent-{stream}"})
    messages: list[Any] = list(SUM)
    bridged = []
    for turn in range(3):
        body: dict[str, Any] = {
            "model": "tiny", "messages": messages, "tools": [TOOL], "seed": seed, "max_tokens": 64,
        }  # fmt: skip
        if stream:
            async with client.chat.completions.stream(**body) as events:
                bridged.append(events._response.headers["x-lockstep-bridged"])
                response = await events.get_final_completion()
        else:
            raw = await client.chat.completions.with_raw_response.create(**body)
            bridged.append(raw.headers["x-lockstep-bridged"])
            assert raw.headers["x-lockstep-versions"]
            response = raw.parse()
        message = response.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            assert json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "503"})
        if turn == 0:
            assert message.tool_calls
        if not message.tool_calls:
            messages.append({"role": "user", "content": "And 1 + 1?"})
    assert bridged == ["false", "true", "true"]
    (sample,) = await served.sessions.samples(f"agent-{stream}")
    assert sample.breaks == ()
    assert any(sample.sampled_mask)


async def test_the_session_may_be_in_the_base_url(served: Served) -> None:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/sessions/by-path/v1", api_key="none")
    response = await client.chat.completions.create(model="tiny", messages=REVERSE, max_tokens=16)
    reply = response.choices[0].message
    more = [*REVERSE, reply, {"role": "user", "content": "Reverse: 12"}]
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=more, max_tokens=16, extra_body={"return_token_ids": True}
    )
    assert raw.headers["x-lockstep-bridged"] == "true"
    (sample,) = await served.sessions.samples("by-path")
    prompt = raw.parse().prompt_token_ids  # type: ignore[attr-defined]
    assert sample.token_ids[: len(prompt)] == prompt
    await client.close()


@pytest.mark.failure_mode("F02")
async def test_an_edited_history_forks_or_is_refused_as_the_caller_chose(served: Served) -> None:
    session = {"x-session-id": "edited"}
    await served.post(messages=REVERSE, max_tokens=8, headers=session)
    edited = [*REVERSE, {"role": "assistant", "content": "never said"}, *REVERSE]
    error = await served.refusal(
        status=409, messages=edited, headers={**session, "x-session-breaks": "strict"}
    )
    assert error["reason"] == "prefix_break"
    response = await served.http.post(
        CHAT, json={"messages": edited, "max_tokens": 8}, headers=session
    )
    assert response.headers["x-lockstep-bridged"] == "false"
    assert response.headers["x-lockstep-break"] == "edited_history"
    assert len(await served.sessions.samples("edited")) == 2
    error = await served.refusal(messages=REVERSE, headers={"x-session-breaks": "sometimes"})
    assert error["param"] == "x-session-breaks"


@pytest.mark.failure_mode("F53")
async def test_a_turn_at_another_temperature_splits_its_branch_or_is_refused(
    served: Served,
) -> None:
    session = {"x-session-id": "mixed"}
    response = await served.post(messages=REVERSE, max_tokens=8, headers=session)
    more = [*REVERSE, response["choices"][0]["message"], *REVERSE]
    error = await served.refusal(
        status=409,
        messages=more,
        temperature=0.5,
        headers={**session, "x-session-breaks": "strict"},
    )
    assert (error["reason"], error["param"]) == ("conflict", "temperature")
    await served.post(messages=more, temperature=0.5, max_tokens=8, headers=session)
    await served.post(messages=SUM, max_tokens=8, headers=session)
    samples = await served.sessions.samples("mixed")
    assert [(sample.temperature, sample.split) for sample in samples] == [
        (1.0, ("temperature",)),
        (0.5, ("temperature",)),
        (1.0, ()),
    ]


@pytest.mark.failure_mode("F55")
async def test_choices_that_follow_one_turn_train_it_once(served: Served) -> None:
    session = {"x-session-id": "shared"}
    response = await served.post(messages=REVERSE, max_tokens=8, headers=session)
    more = [*REVERSE, response["choices"][0]["message"], *REVERSE]
    await served.post(messages=more, n=3, max_tokens=8, headers=session)
    everything = await served.sessions.samples("shared", dedupe=False)
    samples = await served.sessions.samples("shared")
    shared = response["usage"]["completion_tokens"]
    for all_of_it, sample in zip(everything[1:], samples[1:], strict=True):
        assert sum(all_of_it.sampled_mask) - sum(sample.sampled_mask) == shared
        assert [span.sample for span in sample.trained_in] == [0]
    assert samples[0] == everything[0]


@pytest.mark.failure_mode("F66")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_cuts_the_text_and_no_id(
    served: Served, worker: WorkerProcess, stream: bool, include: bool
) -> None:
    name = f"stop-{stream}-{include}"
    options = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    plain = (await served.post(messages=SUM, **options))["choices"][0]
    text = plain["message"]["content"]
    stop = text[len(text) // 2 :][:2]
    cut = text[: text.index(stop) + len(stop) * include].strip()
    body = {**options, "messages": SUM, "stop": [stop, "never"], "logprobs": True,
            "include_stop_str_in_output": include}  # fmt: skip
    session = {"x-session-id": name}
    if stream:
        chunks = await served.chunks(headers=session, **body)
        (choice,) = joined(chunks)
        content, ended = choice["content"], chunks[-1]["choices"][0]
        ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids") or ()]
    else:
        ended = (await served.post(headers=session, **body))["choices"][0]
        content, ids = ended["message"]["content"], ended["token_ids"]
        assert len(ended["logprobs"]["content"]) == len(ids)
    assert content == cut
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", stop)
    assert ids == plain["token_ids"][: len(ids)]
    assert stop in Renderer.load("tiny").decode(ids)
    (sample,) = await served.sessions.samples(name)
    ((start, end),) = sample.stops
    assert end == len(sample.token_ids)
    assert stop in Renderer.load("tiny").decode(sample.token_ids[start:end])
    assert sum(sample.sampled_mask) == len(ids)

    more = [*SUM, {"role": "assistant", "content": content}, *REVERSE]
    after = await served.http.post(
        CHAT, json={"messages": more, "max_tokens": 2, "return_token_ids": True}, headers=session
    )
    assert after.headers["x-lockstep-bridged"] == "true"
    assert after.json()["prompt_token_ids"][: len(sample.token_ids)] == sample.token_ids


@pytest.mark.failure_mode("F21")
async def test_a_cut_turn_is_closed_with_tokens_that_were_not_sampled(
    served: Served, renderer: Renderer
) -> None:
    session = {"x-session-id": "cut"}
    cut = await served.post(
        messages=REVERSE, max_tokens=2, min_tokens=2, headers=session, return_token_ids=True
    )
    choice = cut["choices"][0]
    assert choice["finish_reason"] == "length"
    more = [*REVERSE, choice["message"], {"role": "user", "content": "Go on."}]
    after = await served.post(messages=more, max_tokens=4, headers=session, return_token_ids=True)
    before = cut["prompt_token_ids"] + choice["token_ids"]
    assert after["prompt_token_ids"][: len(before)] == before
    closing = after["prompt_token_ids"][len(before)]
    assert closing in renderer.stop_token_ids
    (sample,) = await served.sessions.samples("cut")
    assert sample.sampled_mask[len(before)] is False


async def test_all_choices_of_a_turn_are_branches_of_the_session(served: Served) -> None:
    session = {"x-session-id": "branches"}
    response = await served.post(messages=REVERSE, n=3, max_tokens=8, headers=session)
    more = [*REVERSE, response["choices"][2]["message"], *REVERSE]
    chunks = await served.chunks(messages=more, max_tokens=8, headers=session)
    assert chunks[-1]["choices"][0]["finish_reason"]
    assert len(await served.sessions.samples("branches")) == 3


@pytest.mark.parametrize(
    "more",
    [
        {"required_prefix_token_ids": [1, 2]},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
)
async def test_a_session_makes_the_prompt_itself(served: Served, more: dict[str, Any]) -> None:
    error = await served.refusal(messages=REVERSE, headers={"x-session-id": "own"}, **more)
    assert "session" in error["message"]


async def first_turn(served: Served) -> dict[str, Any]:
    response = await served.post(
        messages=REVERSE, temperature=0, max_tokens=16, return_token_id_information=True
    )
    message: dict[str, Any] = response["choices"][0]["message"]
    return message


async def test_ids_on_messages_are_the_beginning_of_the_next_prompt(
    served: Served, renderer: Renderer
) -> None:
    reply = await first_turn(served)
    before = reply["prompt_token_ids"] + reply["generation_token_ids"]
    assert len(reply["generation_log_probs"]) == len(reply["generation_token_ids"])
    more = [*REVERSE, reply, {"role": "user", "content": "Reverse: 12"}]
    by_message = await served.post(messages=more, max_tokens=1, return_token_ids=True)
    bare = [*REVERSE, {"role": "assistant", "content": reply["content"]}, more[-1]]
    by_prefix = await served.post(
        messages=bare, required_prefix_token_ids=before, max_tokens=1, return_token_ids=True
    )
    prompt = by_message["prompt_token_ids"]
    assert prompt[: len(before)] == before
    assert by_prefix["prompt_token_ids"] == prompt
    assert renderer.decode(prompt[len(before) :]) == (
        "\n<|im_start|>user\nReverse: 12<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_ids_that_are_not_of_the_messages_are_refused(served: Served) -> None:
    reply = await first_turn(served)
    before = reply["prompt_token_ids"] + reply["generation_token_ids"]
    question = {"role": "user", "content": "Reverse: 12"}
    edited = {**reply, "content": "99999"}
    other = [{"role": "user", "content": "Reverse: 77"}]
    short = {**reply, "generation_log_probs": []}
    half = {key: value for key, value in reply.items() if key != "generation_log_probs"}
    bare = {"role": "assistant", "content": reply["content"]}
    for messages, more in (
        ([*REVERSE, edited, question], {}),
        ([*other, reply, question], {}),
        ([*REVERSE, short, question], {}),
        ([*REVERSE, half, question], {}),
        ([*REVERSE, reply], {}),
        ([*REVERSE, reply, question, bare, question], {}),
        ([*REVERSE, reply, question], {"required_prefix_token_ids": before[:-1]}),
        ([*REVERSE, bare, question], {"required_prefix_token_ids": [5, 6, 7]}),
        ([*other, bare, question], {"required_prefix_token_ids": before}),
        (REVERSE, {"required_prefix_token_ids": before}),
    ):
        await served.refusal(messages=messages, **more)


async def test_a_prefix_that_ends_in_a_user_turn_is_the_prompt_and_on_the_message(
    served: Served, renderer: Renderer
) -> None:
    whole = renderer.render(REVERSE)
    end = max(at for at, token in enumerate(whole) if token in renderer.stop_token_ids)
    response = await served.post(
        messages=REVERSE, required_prefix_token_ids=whole[:end], max_tokens=1, logprobs=True
    )
    message = response["choices"][0]["message"]
    assert message["prompt_token_ids"] == whole
    assert len(message["generation_token_ids"]) == len(message["generation_log_probs"]) == 1


async def test_the_sdk_reads_logprobs_and_usage(served: Served) -> None:
    response = await served.openai.chat.completions.create(
        model="tiny", messages=REVERSE, logprobs=True, top_logprobs=2, temperature=0, n=2
    )
    for choice in response.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    stream = await served.openai.chat.completions.create(
        model="tiny",
        messages=REVERSE,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == response.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        await served.openai.chat.completions.create(
            model="tiny", messages=SUM, tool_choice="required"
        )
