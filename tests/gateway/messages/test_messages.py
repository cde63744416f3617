"""POST /v1/messages in front of a scripted worker: Anthropic's contract, in our sessions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.dialects import DialectServer, Event, dialect_server, scripted_worker
from tests.processes import WorkerProcess

MESSAGES = "/v1/messages"
RULES: list[dict[str, Any]] = [
    {
        "when": {"last": "fails early"},
        "error": {"status": 429, "message": "not now", "retry_after": 2},
    },
    {"when": {"last": "fails late"}, "say": "half of it", "error": {"after_tokens": 3}},
    {"when": {"last": "a title"}, "say": '{"title": "Files"}'},
    {
        "when": {"last": "two files"},
        "think": "I look at both.",
        "say": "Reading both.",
        "calls": [
            {"name": "Read", "arguments": {"path": "a.txt", "limit": 5000.0}},
            {"name": "Read", "arguments": {"path": "b.txt"}},
        ],
    },
    {"when": {"last": "find a tool"}, "calls": [{"name": "Search", "arguments": {"q": "stop"}}]},
    {"when": {"last": "TaskStop"}, "calls": [{"name": "TaskStop", "arguments": {"id": "1"}}]},
    {"when": {"last": "tool_response|and then"}, "think": "Both read.", "say": "Done."},
    {"say": "Hello there."},
]
READ = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 200}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with scripted_worker(tmp_path_factory.mktemp("script"), RULES) as process:
        yield process


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def result(call: dict[str, Any], content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": content, **more}


async def test_a_plain_question_gets_a_plain_answer(server: DialectServer) -> None:
    message = await server.ok(MESSAGES, {**BODY, "messages": [user("Hello")], "system": "Be kind."})
    assert message["type"] == "message"
    assert message["role"] == "assistant"
    assert message["content"] == [text("Hello there.")]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["input_tokens"] > message["usage"]["output_tokens"] > 0


async def test_thinking_text_and_parallel_calls_come_as_blocks(server: DialectServer) -> None:
    body = {**BODY, "messages": [user("two files")], "tools": [READ]}
    message = await server.ok(MESSAGES, body)
    thinking, words, first, second = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "I look at both.")
    assert words == text("Reading both.")
    assert first["input"] == {"path": "a.txt", "limit": 5000.0}
    assert second["input"] == {"path": "b.txt"}
    assert first["id"] != second["id"]
    assert message["stop_reason"] == "tool_use"


async def test_a_stream_has_every_event_in_order_and_adds_up_to_the_response(
    server: DialectServer,
) -> None:
    body = {**BODY, "messages": [user("two files")], "tools": [READ]}
    events = await server.events(MESSAGES, body)
    names = [name for name, _ in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 0
    assert end["delta"]["stop_reason"] == "tool_use"
    whole = await server.ok(MESSAGES, body)
    assert end["usage"] == whole["usage"]
    assert [
        block["input"] if block["type"] == "tool_use" else block for block in joined(events)
    ] == [block["input"] if block["type"] == "tool_use" else block for block in whole["content"]]


def joined(events: list[Event]) -> list[dict[str, Any]]:
    """The blocks that the deltas add up to, each opened and closed once and in order."""
    blocks: list[dict[str, Any]] = []
    open_index: int | None = None
    for name, data in events:
        if name == "content_block_start":
            assert open_index is None
            open_index = data["index"]
            assert open_index == len(blocks)
            blocks.append({**data["content_block"], "json": ""})
        elif name == "content_block_delta":
            assert data["index"] == open_index
            delta = dict(data["delta"])
            kind = delta.pop("type")
            for key, value in delta.items():
                target = "json" if kind == "input_json_delta" else key
                blocks[-1][target] += value
        elif name == "content_block_stop":
            assert data["index"] == open_index
            open_index = None
            arguments = blocks[-1].pop("json")
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments)
    assert open_index is None
    return blocks


@pytest.mark.failure_mode("F60")
async def test_a_tool_agent_stays_on_one_branch_however_it_writes_its_history(
    server: DialectServer,
) -> None:
    path = "/sessions/agent" + MESSAGES
    marked = {"cache_control": {"type": "ephemeral"}}
    body = {**BODY, "tools": [READ], "system": [text("Be kind.", **marked)]}
    first = await server.ok(path, {**body, "messages": [user([text("two files", **marked)])]})
    thinking, words, one, two = first["content"]
    # Keys in another order, a number in another spelling, blank text, results marked; then results
    # split and in another order, space around the text, and the thinking left out.
    one = {**one, "input": {"limit": 5000, "path": "a.txt"}}
    history = [
        user("two files"),
        {"role": "assistant", "content": [thinking, text("\n"), words, one, {**two, **marked}]},
        user([result(one, [text("A")]), result(two, "B", **marked), text("and then?")]),
    ]
    second = await server.ok(path, {**body, "system": "Be kind.", "messages": history})
    assert second["content"][-1] == text("Done.")
    history = [
        *history[:1],
        {"role": "assistant", "content": [text("\n" + words["text"] + " "), one, two]},
        user([result(two, [text("B")])]),
        user([result(one, "A"), text("and then?", **marked)]),
        {"role": "assistant", "content": second["content"]},
        user("Thanks"),
    ]
    response = await server.post(path, {**body, "messages": history})
    assert response.headers["x-lockstep-bridged"] == "true"
    assert server.breaks("agent") == {}
    (sample,) = await server.samples("agent")
    assert sum(sample.sampled_mask) == sum(
        each["usage"]["output_tokens"] for each in (first, second, response.json())
    )


async def test_an_edited_turn_is_a_break_and_edited_thinking_is_refused(
    server: DialectServer,
) -> None:
    path = "/sessions/edited" + MESSAGES
    body = {**BODY, "tools": [READ]}
    first = await server.ok(path, {**body, "messages": [user("two files")]})
    thinking, _, one, two = first["content"]
    results = user([result(one, "A"), result(two, "B")])

    def history(*content: dict[str, Any]) -> dict[str, Any]:
        replied = {"role": "assistant", "content": list(content)}
        return {**body, "messages": [user("two files"), replied, results]}

    changed = {**thinking, "thinking": "I look at one."}
    response = await server.post(path, history(changed, one, two))
    assert response.status_code == 400
    assert "Invalid `signature` in `thinking` block" in response.json()["error"]["message"]
    response = await server.post(path, history(thinking, text("Something else."), one, two))
    assert response.headers["x-lockstep-break"] == "edited_history"


async def test_a_session_continues_from_messages_in_chat_and_back(server: DialectServer) -> None:
    headers = {"x-session-id": "both"}
    first = await server.ok(MESSAGES, {**BODY, "messages": [user("Hello")]}, **headers)
    words = first["content"][0]["text"]
    history = [user("Hello"), {"role": "assistant", "content": words}, user("And now?")]
    chat = await server.ok(
        "/v1/chat/completions", {"model": "tiny", "messages": history}, **headers
    )
    more = [
        *history,
        {"role": "assistant", "content": [text(chat["choices"][0]["message"]["content"])]},
        user([text("And then?")]),
    ]
    await server.ok(MESSAGES, {**BODY, "messages": more}, **headers)
    assert server.breaks("both") == {}
    assert len(await server.samples("both")) == 1


@pytest.mark.failure_mode("F57")
async def test_the_billing_header_of_claude_code_is_dropped_and_reported(
    server: DialectServer,
) -> None:
    path = "/sessions/billed" + MESSAGES

    def body(digits: str, *messages: dict[str, Any]) -> dict[str, Any]:
        header = f"x-anthropic-billing-header: cc_version=2.1.325.{digits}; cc_entrypoint=cli;"
        return {**BODY, "system": [text(header), text("Be kind.")], "messages": list(messages)}

    first = await server.post(path, body("ddf", user("Hello")))
    assert "system.billing_header" in first.headers["x-lockstep-accepted"]
    replied = {"role": "assistant", "content": first.json()["content"]}
    second = await server.post(path, body("a01", user("Hello"), replied, user("More")))
    assert second.headers["x-lockstep-bridged"] == "true"


async def test_a_tool_that_a_search_found_is_described_there_and_can_be_called(
    server: DialectServer,
) -> None:
    path = "/sessions/search" + MESSAGES
    search = {"name": "Search", "input_schema": {"type": "object"}}
    stop = {"name": "TaskStop", "input_schema": {"type": "object"}, "defer_loading": True}
    hidden = {**stop, "name": "Placeholder"}
    first = await server.ok(
        path, {**BODY, "tools": [search, hidden, READ], "messages": [user("find a tool")]}
    )
    (call,) = first["content"]
    history = [
        user("find a tool"),
        {"role": "assistant", "content": [call]},
        user([result(call, [{"type": "tool_reference", "tool_name": "TaskStop"}])]),
    ]
    response = await server.post(
        path, {**BODY, "tools": [search, stop, hidden, READ], "messages": history}
    )
    assert response.headers["x-lockstep-bridged"] == "true"
    assert response.json()["content"][0]["name"] == "TaskStop"
    (sample,) = await server.samples("search")
    shown = server.renderer.decode(sample.token_ids)
    assert shown.count('"TaskStop", "parameters"') == 1
    assert "Placeholder" not in shown


async def test_a_system_message_among_the_others_is_rendered_there(server: DialectServer) -> None:
    messages = [user("Hello"), {"role": "system", "content": [text("Be brief.")]}]
    await server.ok("/sessions/inner" + MESSAGES, {**BODY, "messages": messages})
    (sample,) = await server.samples("inner")
    assert "<|im_start|>system\nBe brief.<|im_end|>" in server.renderer.decode(sample.token_ids)


async def test_fields_of_claude_code_are_accepted_and_listed(server: DialectServer) -> None:
    response = await server.post(
        MESSAGES + "?beta=true",
        {
            **BODY,
            "messages": [user("Hello")],
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "thinking": {"type": "adaptive", "display": "omitted"},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "{}"},
        },
    )
    assert response.status_code == 200, response.text
    assert response.headers["x-lockstep-accepted"] == (
        "context_management,metadata,output_config.effort,thinking.display"
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": ["there", ""]}, "stop_sequences.1"),
        ({"messages": []}, "messages"),
        ({"messages": [user([{"type": "video"}])]}, "messages[0].content[0]"),
        ({"messages": [user([text("a", colour="red")])]}, "colour"),
        ({"messages": [user([{"type": "image", "source": {}}])]}, "messages.0.content.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ],
)
async def test_unknown_fields_are_rejected_by_name_in_anthropics_shape(
    server: DialectServer, change: dict[str, Any], named: str
) -> None:
    response = await server.post(MESSAGES, {**BODY, "messages": [user("Hello")], **change})
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]
    assert body["request_id"]


async def test_an_error_before_the_first_token_is_a_status_and_after_it_an_event(
    server: DialectServer,
) -> None:
    early = await server.post(MESSAGES, {**BODY, "messages": [user("fails early")], "stream": True})
    assert early.status_code == 429
    assert early.headers["retry-after"] == "2"
    assert early.json()["error"]["type"] == "rate_limit_error"
    events = await server.events(MESSAGES, {**BODY, "messages": [user("fails late")]})
    name, data = events[-1]
    assert name == "error"
    assert data["error"]["type"] == "api_error"
    assert "message_stop" not in [name for name, _ in events]


async def test_a_token_limit_beyond_the_context_is_clamped_and_reported(
    server: DialectServer,
) -> None:
    body = {**BODY, "messages": [user("Hello")], "max_tokens": 1_000_000}
    response = await server.post(MESSAGES, body)
    assert response.status_code == 200, response.text
    room = 131_072 - response.json()["usage"]["input_tokens"]
    assert response.headers["x-lockstep-max-tokens"] == str(room)


async def test_a_stop_sequence_ends_the_text_and_is_named(server: DialectServer) -> None:
    body = {**BODY, "messages": [user("Hello")], "stop_sequences": ["there"]}
    message = await server.ok(MESSAGES, body)
    assert message["content"] == [text("Hello")]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "there")
    events = await server.events(MESSAGES, body)
    assert joined(events) == [text("Hello")]
    assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "there"}


async def test_a_schema_constrains_the_reply(server: DialectServer) -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    body = {**BODY, "messages": [user("a title")], "output_config": wanted}
    message = await server.ok(MESSAGES, body)
    assert json.loads(message["content"][0]["text"]) == {"title": "Files"}
    refused = await server.post(MESSAGES, {**body, "messages": [user("Hello")]})
    assert "does not fit the grammar" in refused.json()["error"]["message"]


async def test_the_token_limit_ends_a_turn_as_max_tokens(server: DialectServer) -> None:
    body = {**BODY, "messages": [user("Hello")], "max_tokens": 2}
    assert (await server.ok(MESSAGES, body))["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("words", [50_000, 400_000])
async def test_a_prompt_too_long_is_reported_in_words_that_clients_parse(
    server: DialectServer, words: int
) -> None:
    response = await server.post(MESSAGES, {**BODY, "messages": [user("word " * words)]})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert re.fullmatch(r"prompt is too long: \d+ tokens > \d+ maximum", message), message


async def test_tokens_are_counted_as_they_are_rendered(server: DialectServer) -> None:
    body = {"model": "tiny", "messages": [user("Hello")], "tools": [READ], "system": "Be kind."}
    counted = await server.ok(MESSAGES + "/count_tokens?beta=true", body)
    message = await server.ok(MESSAGES, {**body, "max_tokens": 20})
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}


async def test_the_first_word_of_claude_code_is_answered(server: DialectServer) -> None:
    for path in ("/api/hello", "/sessions/any/api/hello"):
        assert (await server.http.head(path)).status_code == 200


async def test_either_header_carries_the_key(worker: WorkerProcess) -> None:
    async with dialect_server(worker, api_keys=("sk-1",)) as server:
        body = {**BODY, "messages": [user("Hello")]}
        for headers in ({"x-api-key": "sk-1"}, {"authorization": "Bearer sk-1"}):
            await server.ok(MESSAGES, body, **headers)
        assert (await server.post(MESSAGES, body)).status_code == 401


async def test_a_prefilled_message_is_continued(server: DialectServer) -> None:
    messages = [user("Hello"), {"role": "assistant", "content": "Hello"}]
    message = await server.ok(MESSAGES, {**BODY, "messages": messages})
    assert message["content"][0]["text"] == "Hello there."


def thread(message: dict[str, Any] | None = None) -> dict[str, Any]:
    if message is None:
        return {"type": "create"}
    return {"type": "continue", "previous_message_id": message["id"]}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_thread_is_continued_with_its_new_messages_only(
    server: DialectServer, streamed: bool
) -> None:
    name = f"thread-{streamed}"
    path = f"/sessions/{name}{MESSAGES}"
    opening = {
        **BODY,
        "messages": [user("two files")],
        "tools": [READ],
        "system": "Be kind.",
        "thread": thread(),
    }
    if streamed:
        events = await server.events(path, opening)
        assert events[-1][0] == "message_stop"
        first, calls = (
            events[0][1]["message"],
            [
                data["content_block"]
                for event, data in events
                if event == "content_block_start" and data["content_block"]["type"] == "tool_use"
            ],
        )
    else:
        first = await server.ok(path, opening)
        calls = first["content"][2:]
    results = [result(call, "text") for call in calls]
    body = {**BODY, "messages": [user(results)], "thread": thread(first)}
    counted = await server.ok(f"{path}/count_tokens", body)
    second = await server.ok(path, body)
    assert second["content"][-1] == text("Done.")
    assert second["usage"]["input_tokens"] == counted["input_tokens"]
    (sample,) = await server.samples(name)
    assert server.breaks(name) == {}
    assert "Be kind." in server.renderer.decode(sample.token_ids)


async def test_a_thread_that_is_not_held_is_named_so_that_the_client_sends_it_again(
    server: DialectServer,
) -> None:
    first = await server.ok(
        MESSAGES, {**BODY, "messages": [user("Hello")], "thread": thread(), "system": "Be kind."}
    )
    unthreaded = await server.ok(MESSAGES, {**BODY, "messages": [user("Hello")]})
    body = {**BODY, "messages": [user("and then")]}
    for path, message in (("/sessions/other" + MESSAGES, first), (MESSAGES, unthreaded)):
        response = await server.post(path, {**body, "thread": thread(message)})
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["type"] == "not_found_error"
        assert error["details"] == {"error_code": "thread_not_found"}
    changed = await server.post(MESSAGES, {**body, "thread": thread(first), "system": "Be brief."})
    assert changed.status_code == 400
    assert changed.json()["error"]["message"].startswith("system: ")
    unnamed = await server.post(MESSAGES, {**body, "thread": {"type": "continue"}})
    assert unnamed.json()["error"]["message"] == "thread.previous_message_id: Field required"


async def test_a_route_that_is_not_served_has_anthropic_s_error(server: DialectServer) -> None:
    for response in (
        await server.post(f"{MESSAGES}/batches", {"requests": []}),
        await server.http.get(f"{MESSAGES}/batches/msgbatch_1/results"),
    ):
        assert response.status_code == 404
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == "not_found_error"
        assert "count_tokens" in response.json()["error"]["message"]
