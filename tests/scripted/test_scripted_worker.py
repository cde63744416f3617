"""A scripted worker behaves like any other: ids, logprobs, versions, updates, aborts, errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.render import Renderer
from tests.processes import WorkerProcess
from tests.worker.conftest import checkpoint

__all__ = ["checkpoint"]

RULES: list[dict[str, Any]] = [
    {
        "when": {"last": r"list (\w+)"},
        "think": "I look.",
        "say": "Looking.",
        "calls": [
            {"name": "bash", "arguments": {"command": "ls {{1}}"}},
            {"name": "bash", "arguments": {"command": "pwd"}},
        ],
    },
    {"when": {"last": "tool_response", "turn": 1}, "say": "Two files."},
    {"when": {"last": "once"}, "error": {"status": 503, "message": "not now"}, "times": 1},
    {"when": {"last": "break"}, "say": "a reply that breaks", "error": {"after_tokens": 3}},
    {"when": {"last": "short"}, "say": "cut", "finish": "length"},
    {"when": {"last": "raw"}, "raw": '<tool_call>\n{"name": "bash", "argu\n</tool_call>'},
    {"when": {"last": "slow"}, "say": "word " * 50, "token_delay": 0.02},
    {"when": {"last": "hello|text"}, "say": "Hello."},
]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load("tiny")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    path = tmp_path_factory.mktemp("script") / "script.jsonl"
    path.write_text("\n".join(map(json.dumps, RULES)))
    process = WorkerProcess("--script", str(path))
    yield process
    process.stop()


def prompt(renderer: Renderer, text: str) -> list[int]:
    return renderer.render([{"role": "user", "content": text}], TOOLS)


async def test_text_thinking_and_calls_are_in_the_models_own_format(
    worker: WorkerProcess, renderer: Renderer
) -> None:
    ids = prompt(renderer, "list src")
    status, body = await worker.generate(ids)
    message = renderer.parse(body["choices"][0]["token_ids"], TOOLS, prompt_ids=ids)
    assert (status, message.reasoning, message.content) == (200, "I look.", "Looking.")
    arguments = [json.loads(call.arguments or "") for call in message.tool_calls]
    assert arguments == [{"command": "ls src"}, {"command": "pwd"}]
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_rules_match_the_turn_and_the_last_message(
    worker: WorkerProcess, renderer: Renderer
) -> None:
    call = {"name": "bash", "arguments": {"command": "ls"}}
    history = [
        {"role": "user", "content": "list src"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": "a.py b.py"},
    ]
    _, body = await worker.generate(renderer.render(history, TOOLS))
    assert renderer.parse(body["choices"][0]["token_ids"]).content == "Two files."


async def test_scoring_the_same_ids_gives_the_same_logprobs_whole_or_streamed(
    worker: WorkerProcess, renderer: Renderer
) -> None:
    ids = prompt(renderer, "list src")
    _, body = await worker.generate(ids, logprobs=1, prompt_logprobs=0)
    choice = body["choices"][0]
    scores = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    _, probe = await worker.control("probe", token_ids=[ids + choice["token_ids"]])
    assert probe["logprobs"][0][len(ids) - 1 :] == scores
    prompt_scores = [next(iter(entry.values()))["logprob"] for entry in body["prompt_logprobs"][1:]]
    assert probe["logprobs"][0][: len(ids) - 1] == prompt_scores
    chunks = [chunk["choices"][0] for chunk in await worker.events(ids, logprobs=1)]
    streamed = [
        entry["logprob"] for chunk in chunks for entry in (chunk["logprobs"] or {})["content"]
    ]
    assert streamed == scores


async def test_a_prompt_of_100_000_tokens_takes_less_than_two_seconds(
    worker: WorkerProcess, renderer: Renderer
) -> None:
    text = renderer.encode("text ") * 50_000
    ids = prompt(renderer, "hello")
    at = len(ids) // 2
    long = ids[:at] + text[:100_000] + ids[at:]
    started = time.monotonic()
    status, _ = await worker.generate(long)
    assert (status, time.monotonic() - started < 2) == (200, True)
    _, models = await worker.get("/v1/models")
    assert models["data"][0]["max_model_len"] == 131_072


async def test_an_update_changes_version_and_logprobs_and_can_be_rolled_back(
    worker: WorkerProcess, renderer: Renderer, checkpoint: Callable[..., Path]
) -> None:
    ids = prompt(renderer, "hello")

    async def live(**options: Any) -> list[float]:
        _, body = await worker.control("probe", token_ids=[ids], **options)
        return list(body["logprobs"][0])

    before = await live()
    status, _ = await worker.control("stage", model_path=str(checkpoint("v1")), weight_version="v1")
    assert status == 200
    assert await live() == before
    staged = await live(staged=True)
    assert staged != before
    _, committed = await worker.control("commit", weight_version="v1")
    assert committed["version"] == "v1"
    assert await live() == staged
    _, body = await worker.generate(ids)
    assert body["choices"][0]["weight_versions"][0]["version"] == "v1"
    await worker.control("rollback")
    assert await live() == before


async def test_tokens_after_an_update_in_flight_carry_the_new_version(
    worker: WorkerProcess, renderer: Renderer, checkpoint: Callable[..., Path]
) -> None:
    path = str(checkpoint("v2"))
    running = asyncio.create_task(worker.generate(prompt(renderer, "slow"), logprobs=1))
    await asyncio.sleep(0.3)
    await worker.control("update_weights_from_disk", model_path=path, weight_version="v2")
    _, body = await running
    await worker.control("rollback")
    spans = body["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "v2"]


async def test_an_abort_keeps_the_tokens_so_far(worker: WorkerProcess, renderer: Renderer) -> None:
    ids = prompt(renderer, "slow")
    running = asyncio.create_task(worker.generate(ids, request_id="mine"))
    await asyncio.sleep(0.3)
    await worker.post("/inference/v1/abort_requests", {"request_ids": ["mine"]})
    _, body = await running
    choice = body["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 50


async def test_errors_occur_as_often_as_the_script_says(
    worker: WorkerProcess, renderer: Renderer
) -> None:
    ids = prompt(renderer, "once, then hello")
    answers = [await worker.generate(ids), await worker.generate(ids)]
    assert [status for status, _ in answers] == [503, 200]
    assert answers[0][1]["error"]["message"] == "not now"


async def test_a_stream_can_break_after_its_first_tokens(
    worker: WorkerProcess, renderer: Renderer
) -> None:
    *tokens, last = await worker.events(prompt(renderer, "break"))
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in tokens) == 3
    assert last["error"]["code"] == 500


async def test_a_turn_can_end_at_its_length_or_with_a_broken_call(
    worker: WorkerProcess, renderer: Renderer
) -> None:
    _, short = await worker.generate(prompt(renderer, "short"))
    assert short["choices"][0]["finish_reason"] == "length"
    ids = prompt(renderer, "raw")
    _, raw = await worker.generate(ids)
    parsed = renderer.parse(raw["choices"][0]["token_ids"], TOOLS, prompt_ids=ids)
    assert [call.ok for call in parsed.calls] == [False]


async def test_a_prompt_without_a_rule_is_rejected(
    worker: WorkerProcess, renderer: Renderer
) -> None:
    status, body = await worker.generate(prompt(renderer, "unforeseen"))
    assert status == 400
    assert "unforeseen" in body["error"]["message"]


async def test_min_tokens_and_max_tokens_are_respected(
    worker: WorkerProcess, renderer: Renderer
) -> None:
    ids = prompt(renderer, "hello")
    _, longer = await worker.generate(ids, min_tokens=20, max_tokens=30, seed=1)
    assert 20 <= len(longer["choices"][0]["token_ids"]) <= 30
    _, cut = await worker.generate(ids, max_tokens=2)
    assert cut["choices"][0]["finish_reason"] == "length"
