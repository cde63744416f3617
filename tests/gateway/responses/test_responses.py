"""POST /v1/responses in front of a scripted worker: OpenAI's contract, in our sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from lockstep.storage.sqlite.sessions import SqliteSessionStore
from tests.gateway.dialects import DialectServer, Event, dialect_server, scripted_worker
from tests.processes import WorkerProcess

RESPONSES = "/v1/responses"
RULES: list[dict[str, Any]] = [
    {"when": {"last": "fails early"}, "error": {"status": 429, "message": "not now"}},
    {"when": {"last": "fails late"}, "say": "half of it", "error": {"after_tokens": 3}},
    {
        "when": {"last": "two files"},
        "think": "I look at both.",
        "say": "Reading both.",
        "calls": [
            {"name": "read", "arguments": {"path": "a.txt"}},
            {"name": "read", "arguments": {"path": "b.txt"}},
        ],
    },
    {"when": {"last": "run it"}, "calls": [{"name": "exec", "arguments": {"input": "text(1)\n"}}]},
    {"when": {"last": "spawn"}, "calls": [{"name": "agents.spawn", "arguments": {"task": "t"}}]},
    {"when": {"last": "tool_response"}, "think": "Read.", "say": "Done."},
    {"say": "Hello there."},
]
READ = {
    "type": "function",
    "name": "read",
    "description": "Reads a file.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
EXEC = {
    "type": "custom",
    "name": "exec",
    "description": "Runs a script.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Agents.",
    "tools": [{**READ, "name": "spawn"}],
}
BODY: dict[str, Any] = {"model": "tiny", "max_output_tokens": 200}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with scripted_worker(tmp_path_factory.mktemp("script"), RULES) as process:
        yield process


def message(role: str, text: str, **more: Any) -> dict[str, Any]:
    part = {"type": "input_text", "text": text}
    return {"type": "message", "role": role, "content": [part], **more}


def output(call: dict[str, Any], text: Any) -> dict[str, Any]:
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": text}


async def test_text_in_text_out(server: DialectServer) -> None:
    response = await server.ok(RESPONSES, {**BODY, "input": "Hello", "instructions": "Be kind."})
    (words,) = response["output"]
    assert (response["object"], response["status"]) == ("response", "completed")
    assert words["content"][0]["text"] == "Hello there."
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


async def test_reasoning_text_and_parallel_calls_are_items(server: DialectServer) -> None:
    response = await server.ok(RESPONSES, {**BODY, "input": "two files", "tools": [READ]})
    reasoning, words, first, second = response["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "I look at both."}]
    assert reasoning["encrypted_content"]
    assert words["content"][0]["text"] == "Reading both."
    assert [json.loads(each["arguments"])["path"] for each in (first, second)] == [
        "a.txt",
        "b.txt",
    ]
    assert first["call_id"] != second["call_id"]


async def test_a_stream_has_every_event_in_order_and_adds_up_to_the_response(
    server: DialectServer,
) -> None:
    body = {**BODY, "input": "two files", "tools": [READ]}
    events = await server.events(RESPONSES, body)
    names = [name.removeprefix("response.") for name, _ in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    deltas = [name for at, name in enumerate(names) if name != names[at - 1]]
    assert deltas == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *2
        * (
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        "completed",
    ]
    done = events[-1][1]["response"]
    whole = await server.ok(RESPONSES, body)
    assert done["usage"] == whole["usage"]
    assert bare(done["output"]) == bare(whole["output"])
    assert bare(done["output"]) == bare(ended(events))


def ended(events: list[Event]) -> list[dict[str, Any]]:
    return [data["item"] for name, data in events if name == "response.output_item.done"]


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items without what is another in each response."""
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in items
    ]


async def test_a_tool_agent_stays_on_one_branch_however_it_writes_its_history(
    server: DialectServer,
) -> None:
    path = "/sessions/agent" + RESPONSES
    body = {**BODY, "tools": [READ], "store": False}
    opening = [message("developer", "Be kind.", id="msg_1"), message("user", "two files")]
    first = await server.ok(path, {**body, "input": opening})
    reasoning, words, one, two = first["output"]
    # As Codex sends it back: with ids and nulls; then as opencode does: roles only, no reasoning.
    history = [
        *opening,
        {**reasoning, "content": None},
        {**words, "phase": "commentary"},
        one,
        two,
        {**output(one, "A"), "id": "fco_1"},
        output(two, [{"type": "input_text", "text": "B"}]),
    ]
    second = await server.ok(path, {**body, "input": history})
    history = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "two files"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Reading both."}]},
        *(
            {
                "type": "function_call",
                "call_id": call["call_id"],
                "name": "read",
                "arguments": json.dumps(json.loads(call["arguments"]), separators=(",", ":")),
            }
            for call in (one, two)
        ),
        output(one, "A"),
        output(two, "B"),
        *second["output"],
        {"role": "user", "content": "Thanks"},
    ]
    response = await server.post(path, {**body, "input": history})
    assert response.status_code == 200, response.text
    assert response.headers["x-lockstep-bridged"] == "true"
    assert server.breaks("agent") == {}
    (sample,) = await server.samples("agent")
    assert sum(sample.sampled_mask) == sum(
        each["usage"]["output_tokens"] for each in (first, second, response.json())
    )


@pytest.mark.parametrize("at", [0, 1, 3, 5])
async def test_an_item_that_was_edited_in_mid_history_is_seen(
    server: DialectServer, at: int
) -> None:
    path = "/sessions/edited" + RESPONSES
    body = {**BODY, "tools": [READ], "store": False}
    history = [message("user", "two files")]
    first = await server.ok(path, {**body, "input": history})
    _, _, one, two = first["output"]
    history += [*first["output"], output(one, "A"), output(two, "B")]
    history += (await server.ok(path, {**body, "input": history}))["output"]
    again = [*history, message("user", "Thanks")]
    assert (await server.post(path, {**body, "input": again})).headers[
        "x-lockstep-bridged"
    ] == "true"
    edited = again.copy()
    edited[at] = {
        0: message("user", "two filez"),
        1: {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look at none."}]},
        3: {**one, "arguments": '{"path": "c.txt"}'},
        5: output(one, "a"),
    }[at]
    response = await server.post(path, {**body, "input": edited})
    assert response.status_code == 200, response.text
    assert response.headers["x-lockstep-break"] == "edited_history"


async def test_a_session_continues_from_responses_in_messages(server: DialectServer) -> None:
    headers = {"x-session-id": "both"}
    body = {**BODY, "input": "two files", "tools": [READ]}
    first = await server.ok(RESPONSES, body, **headers)
    reasoning, words, one, two = first["output"]
    thinking = {
        "type": "thinking",
        "thinking": reasoning["summary"][0]["text"],
        "signature": reasoning["encrypted_content"],
    }
    calls = [
        {
            "type": "tool_use",
            "id": call["call_id"],
            "name": "read",
            "input": json.loads(call["arguments"]),
        }
        for call in (one, two)
    ]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": "text"} for call in calls
    ]
    history = [
        {"role": "user", "content": "two files"},
        {
            "role": "assistant",
            "content": [thinking, {"type": "text", "text": words["content"][0]["text"]}, *calls],
        },
        {"role": "user", "content": results},
    ]
    tool = {"name": "read", "description": "Reads a file.", "input_schema": READ["parameters"]}
    body = {"model": "tiny", "max_tokens": 100, "messages": history, "tools": [tool]}
    response = await server.post("/v1/messages", body, **headers)
    assert response.headers["x-lockstep-bridged"] == "true"
    assert len(await server.samples("both")) == 1


async def test_custom_tools_are_called_with_free_text(server: DialectServer) -> None:
    path = "/sessions/custom" + RESPONSES
    tools = {"type": "additional_tools", "id": "at_1", "role": "developer"}
    named = {"type": "namespace", "name": "functions", "description": "", "tools": [EXEC]}
    opening = [{**tools, "tools": [named]}, message("user", "run it")]
    events = await server.events(path, {**BODY, "input": opening})
    assert "response.custom_tool_call_input.delta" in [name for name, _ in events]
    (call,) = ended(events)
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "exec", "text(1)\n")
    history = [*opening, call, output(call, [{"type": "input_text", "text": "1"}])]
    response = await server.post(path, {**BODY, "input": history})
    assert response.headers["x-lockstep-bridged"] == "true"


async def test_tools_of_a_namespace_are_called_in_it(server: DialectServer) -> None:
    path = "/sessions/spaces" + RESPONSES
    body = {**BODY, "tools": [READ, AGENTS]}
    first = await server.ok(path, {**body, "input": "spawn"})
    (call,) = first["output"]
    assert (call["namespace"], call["name"]) == ("agents", "spawn")
    history = [message("user", "spawn"), call, output(call, "started")]
    response = await server.post(path, {**body, "input": history})
    assert response.headers["x-lockstep-bridged"] == "true"


async def test_a_request_continues_its_previous_response(server: DialectServer) -> None:
    path = "/sessions/previous" + RESPONSES
    body = {**BODY, "tools": [READ], "instructions": "Be kind."}
    first = await server.ok(path, {**body, "input": "two files"})
    outputs = [output(call, "text") for call in first["output"][2:]]
    second = await server.ok(path, {**body, "input": outputs, "previous_response_id": first["id"]})
    assert second["previous_response_id"] == first["id"]
    assert second["output"][-1]["content"][0]["text"] == "Done."
    third = await server.post(
        path, {**body, "input": "Thanks", "previous_response_id": second["id"]}
    )
    assert third.headers["x-lockstep-bridged"] == "true"
    assert len(await server.samples("previous")) == 1


async def test_in_a_session_the_response_before_is_found_by_its_turn_after_a_restart(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    stored, path = str(tmp_path / "sessions.sqlite"), "/sessions/kept" + RESPONSES
    body = {**BODY, "tools": [READ], "instructions": "Be kind."}
    async with dialect_server(worker, sessions=SqliteSessionStore(stored)) as server:
        opening = [message("system", "Be brief."), message("user", "two files")]
        first = await server.ok(path, {**body, "input": opening})
    outputs = [output(call, "text") for call in first["output"][2:]]
    body |= {"input": outputs, "previous_response_id": first["id"]}
    async with dialect_server(worker, sessions=SqliteSessionStore(stored)) as server:
        response = await server.post(path, body)
        assert response.status_code == 200, response.text
        assert response.headers["x-lockstep-bridged"] == "true"
        assert (await server.post("/sessions/other" + RESPONSES, body)).status_code == 400


def references(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


@pytest.mark.parametrize("streamed", [False, True])
async def test_references_stand_for_items_of_the_session(
    server: DialectServer, streamed: bool
) -> None:
    name = f"references-{streamed}"
    path, body = f"/sessions/{name}" + RESPONSES, {**BODY, "tools": [READ, EXEC]}
    items: list[dict[str, Any]] = []
    for question in ("two files", "run it"):
        items.append(message("user", question))
        if streamed:
            first = (await server.events(path, {**body, "input": items}))[-1][1]["response"]
        else:
            first = await server.ok(path, {**body, "input": items})
        calls = [item for item in first["output"] if "call_id" in item]
        items += references(first["output"]) + [output(call, "text") for call in calls]
        response = await server.ok(path, {**body, "input": items})
        items += references(response["output"])
    assert len(await server.samples(name)) == 1
    assert server.breaks(name) == {}


async def test_references_are_found_in_the_turns_of_a_session_after_a_restart(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    stored, path = str(tmp_path / "sessions.sqlite"), "/sessions/kept" + RESPONSES
    body = {**BODY, "tools": [READ, EXEC, AGENTS]}
    items: list[dict[str, Any]] = []
    async with dialect_server(worker, sessions=SqliteSessionStore(stored)) as server:
        for question in ("two files", "run it", "spawn"):
            items.append(message("user", question))
            first = await server.ok(path, {**body, "input": items})
            calls = [item for item in first["output"] if "call_id" in item]
            items += references(first["output"]) + [output(call, "text") for call in calls]
            response = await server.ok(path, {**body, "input": items})
            items += references(response["output"])
    async with dialect_server(worker, sessions=SqliteSessionStore(stored)) as server:
        response = await server.post(path, {**body, "input": [*items, message("user", "Hello")]})
        assert response.status_code == 200, response.text
        assert response.headers["x-lockstep-bridged"] == "true"
        foreign = await server.post("/sessions/other" + RESPONSES, {**body, "input": items})
        assert foreign.status_code == 404
        assert foreign.json()["error"]["param"] == "input[1].id"
        assert items[1]["id"] in foreign.json()["error"]["message"]


async def test_a_deleted_response_takes_its_items_along(server: DialectServer) -> None:
    response = await server.ok(RESPONSES, {**BODY, "input": "Hello"})
    body = {**BODY, "input": [*references(response["output"]), message("user", "More")]}
    assert (await server.post(RESPONSES, body)).status_code == 200
    await server.http.delete(f"{RESPONSES}/{response['id']}")
    assert (await server.post(RESPONSES, body)).status_code == 404


async def test_only_its_owner_reads_and_deletes_a_stored_response(
    server: DialectServer,
) -> None:
    response = await server.ok(RESPONSES, {**BODY, "input": "Hello"})
    path = f"{RESPONSES}/{response['id']}"
    assert (await server.http.get(path)).json() == response
    assert (await server.http.get("/sessions/another" + path)).status_code == 404
    assert (await server.http.delete(path)).json()["deleted"] is True
    assert (await server.http.get(path)).status_code == 404
    body = {**BODY, "input": "More", "previous_response_id": response["id"]}
    gone = await server.post(RESPONSES, body)
    assert gone.status_code == 400
    assert gone.json()["error"]["param"] == "previous_response_id"
    kept = await server.ok(RESPONSES, {**BODY, "input": "Hello", "store": False})
    assert (await server.http.get(f"{RESPONSES}/{kept['id']}")).status_code == 404


async def test_fields_of_codex_are_accepted_and_listed(server: DialectServer) -> None:
    response = await server.post(
        RESPONSES,
        {
            "model": "tiny",
            "input": [message("user", "Hello", id="msg_1")],
            "tools": [READ, AGENTS, {"type": "web_search", "external_web_access": True}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low", "context": "all_turns", "summary": "auto"},
            "text": {"verbosity": "low"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "key",
            "client_metadata": {"session_id": "s"},
        },
    )
    assert response.status_code == 200, response.text
    assert response.headers["x-lockstep-accepted"].split(",") == [
        "client_metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "reasoning.context",
        "reasoning.effort",
        "reasoning.summary",
        "text.verbosity",
        "tools.web_search",
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference"}]}, "input[0]"),
        ({"input": [message("user", "a", colour="red")]}, "input[0].colour"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "computer", "name": "x"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_unknown_fields_are_rejected_by_name(
    server: DialectServer, change: dict[str, Any], named: str
) -> None:
    response = await server.post(RESPONSES, {**BODY, "input": "Hello", **change})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == named


async def test_reasoning_that_was_edited_is_refused(server: DialectServer) -> None:
    first = await server.ok(RESPONSES, {**BODY, "input": "two files", "tools": [READ]})
    reasoning = {**first["output"][0], "summary": [{"type": "summary_text", "text": "Another."}]}
    body = {**BODY, "tools": [READ], "input": [message("user", "two files"), reasoning]}
    response = await server.post(RESPONSES, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input[1].encrypted_content"


async def test_an_error_before_the_first_token_is_a_status_and_after_it_an_event(
    server: DialectServer,
) -> None:
    early = await server.post(RESPONSES, {**BODY, "input": "fails early", "stream": True})
    assert early.status_code == 429
    events = await server.events(RESPONSES, {**BODY, "input": "fails late"})
    name, data = events[-1]
    assert name == "response.failed"
    assert data["response"]["status"] == "failed"
    assert data["response"]["error"]["code"] == "server_error"


async def test_a_prompt_that_does_not_fit_ends_a_run_of_codex(server: DialectServer) -> None:
    body = {**BODY, "input": "word " * 50_000}
    events = await server.events(RESPONSES, body)
    assert [name for name, _ in events] == ["response.created", "response.failed"]
    assert events[-1][1]["response"]["error"]["code"] == "context_length_exceeded"
    whole = await server.post(RESPONSES, body)
    assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_turn_that_was_cut_is_incomplete(server: DialectServer) -> None:
    body = {**BODY, "input": "Hello", "max_output_tokens": 2}
    whole = await server.ok(RESPONSES, body)
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (await server.events(RESPONSES, body))[-1][0] == "response.incomplete"


async def test_a_websocket_is_rejected_so_that_codex_falls_back_to_http(
    server: DialectServer,
) -> None:
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    response = await server.http.get(RESPONSES, headers=upgrade)
    assert response.status_code == 426


async def test_the_sdk_reads_streams_and_parses_the_output(server: DialectServer) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    tools: Any = [READ]
    async with (
        client,
        client.responses.stream(model="tiny", input="two files", tools=tools) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Reading both."
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]


async def test_prompt_tokens_are_counted_without_a_turn(server: DialectServer) -> None:
    body: dict[str, Any] = {"model": "tiny", "input": "two files", "tools": [READ]}
    created = await server.ok(RESPONSES, body)
    counted = await server.ok(f"{RESPONSES}/input_tokens", body)
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": created["usage"]["input_tokens"],
    }
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    async with client:
        count = await client.responses.input_tokens.count(**body)
    assert count.input_tokens == counted["input_tokens"]
    continued = {**body, "previous_response_id": created["id"]}
    more = await server.ok(f"{RESPONSES}/input_tokens", continued)
    assert more["input_tokens"] > counted["input_tokens"]


async def test_the_tools_that_may_be_called_are_checked(server: DialectServer) -> None:
    choice = {"type": "allowed_tools", "mode": "auto"}
    body: dict[str, Any] = {"model": "tiny", "input": "two files", "tools": [READ]}
    for tools, status in (([{"type": "function", "name": "sing"}], 400), ([], 400), (None, 400)):
        sent = {**body, "tool_choice": {**choice, "tools": tools}}
        response = await server.post(RESPONSES, sent)
        assert response.status_code == status
        assert response.json()["error"]["param"] == "tool_choice.allowed_tools"
