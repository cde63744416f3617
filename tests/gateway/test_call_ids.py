"""Ids of tool calls mark their turn: a hint which of two equal calls came back, and no proof."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.dialects import DialectServer, scripted_worker
from tests.processes import WorkerProcess

CALL = {"name": "Read", "arguments": {"path": "a.txt"}}
SESSIONS = ("a", "b", "c")
RULES: list[dict[str, Any]] = [
    *(
        {"when": {"last": f"look {session}"}, "think": "One way.", "calls": [CALL], "times": 1}
        for session in SESSIONS
    ),
    {"when": {"last": "look"}, "think": "Another way.", "calls": [CALL]},
    {"say": "Done."},
]
TOOL = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": [TOOL]}


def question(session: str) -> dict[str, Any]:
    """The first message of a session, whose first attempt has a rule of its own."""
    return {"role": "user", "content": f"look {session}"}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with scripted_worker(tmp_path_factory.mktemp("script"), RULES) as process:
        yield process


async def call_of_attempt(server: DialectServer, session: str) -> dict[str, Any]:
    """The call of one more attempt at the same prompt."""
    body = {**BODY, "messages": [question(session)]}
    message = await server.ok("/v1/messages", body, **{"x-session-id": session})
    (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
    return dict(call)


async def go_on(server: DialectServer, session: str, call: dict[str, Any]) -> None:
    """Sends the call back without its thinking, with a result."""
    done = {"type": "tool_result", "tool_use_id": call["id"], "content": "text"}
    history = [
        question(session),
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [done]},
    ]
    await server.ok("/v1/messages", {**BODY, "messages": history}, **{"x-session-id": session})


async def test_ids_tell_two_equal_calls_apart(
    server: DialectServer,
) -> None:
    first, second = await call_of_attempt(server, "a"), await call_of_attempt(server, "a")
    assert {**first, "id": ""} == {**second, "id": ""}
    assert first["id"] != second["id"]
    assert re.fullmatch("[A-Za-z0-9_-]+", first["id"])
    # The client went on with the first, although the second is the later one.
    await go_on(server, "a", first)
    texts = [server.renderer.decode(sample.token_ids) for sample in await server.samples("a")]
    (longer,) = [text for text in texts if "Done." in text]
    assert "One way." in longer
    assert server.breaks("a") == {}


async def test_an_id_alone_attaches_to_nothing(server: DialectServer) -> None:
    call = await call_of_attempt(server, "b")
    await go_on(server, "b", {**call, "input": {"path": "forged.txt"}})
    assert server.breaks("b") == {"edited_history": 1}
    texts = [server.renderer.decode(sample.token_ids) for sample in await server.samples("b")]
    (forged,) = [text for text in texts if "forged.txt" in text]
    assert "One way." not in forged, "nothing of the turn whose id was borrowed"


async def test_a_call_is_found_again_through_another_dialect(server: DialectServer) -> None:
    call = await call_of_attempt(server, "c")
    again = await server.ok(
        "/v1/chat/completions",
        {
            "model": "tiny",
            "tools": [{"type": "function", "function": {
                "name": TOOL["name"], "description": TOOL["description"],
                "parameters": TOOL["input_schema"],
            }}],
            "messages": [
                question("c"),
                {"role": "assistant", "tool_calls": [{"type": "function", "function": {
                    "name": "Read", "arguments": '{"path": "a.txt"}'}, "id": call["id"]}]},
                {"role": "tool", "tool_call_id": call["id"], "content": "text"},
            ],
        },
        **{"x-session-id": "c"},
    )  # fmt: skip
    assert again["choices"][0]["message"]["content"] == "Done."
    assert server.breaks("c") == {}
