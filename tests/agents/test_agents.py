"""Real agents against the gateway: each ends its task, and its session is one exact sample."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from lockstep.tokens import Sample
from tests.agents.programs import INSTALLED, Ended, Sandbox
from tests.agents.script import rules
from tests.gateway.dialects import DialectServer, dialect_server, scripted_worker
from tests.processes import WorkerProcess

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
TASK = "Write hello to out.txt, then read it back."
OPENCODE = {
    "opencode-chat": "@ai-sdk/openai-compatible",
    "opencode-messages": "@ai-sdk/anthropic",
    "opencode-responses": "@ai-sdk/openai",
}
QWEN = {
    "qwen-chat": "openai",
    "qwen-messages": "anthropic",
    "qwen-responses": "openai-responses",
}
MINI = {
    "mini-chat": ("openai/tiny",),
    "mini-messages": ("anthropic/tiny",),
    "mini-responses": ("openai/tiny", "--model-class", "litellm_response"),
}
AGENTS = ("agents-chat", "agents-responses", "agents-streamed", "agents-previous")
PYTHON = str(INSTALLED / "bin" / "python")
HERE = Path(__file__).parent
WINDOW = 75_000
"""A context window that Qwen Code's first prompts nearly fill, in tokens of the bundled model."""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with scripted_worker(tmp_path_factory.mktemp("script"), rules()) as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(worker: WorkerProcess) -> AsyncIterator[DialectServer]:
    async with dialect_server(worker) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(tmp_path: Path) -> Sandbox:
    return await Sandbox.make(tmp_path)


def lineage(samples: list[Sample]) -> dict[int, tuple[str, int | None]]:
    """Kind and parent of each branch, by the turn with which it begins."""
    return {sample.branch: (sample.kind, sample.parent) for sample in samples}


async def play(sandbox: Sandbox, program: str, url: str, task: str = TASK) -> Ended:
    if program == "codex":
        return await sandbox.codex(url, task)
    if program in OPENCODE:
        return await sandbox.opencode(url, OPENCODE[program], task)
    if program in QWEN:
        return await sandbox.qwen(url, QWEN[program], task)
    if program in MINI:
        return await sandbox.mini(url, *MINI[program])
    if program in AGENTS:
        kind = program.removeprefix("agents-")
        return await sandbox.run([PYTHON, str(HERE / "sdk_agents.py"), url, kind])
    return await sandbox.run([PYTHON, str(HERE / "sdk_anthropic.py"), url])


@pytest.mark.parametrize("program", ["codex", *OPENCODE, *QWEN, *MINI, *AGENTS, "anthropic"])
async def test_a_task_of_three_tool_turns_is_one_exact_sample(
    server: DialectServer, sandbox: Sandbox, program: str
) -> None:
    ended = await play(sandbox, program, f"{server.url}/sessions/{program}")
    ended.check()
    assert (sandbox.work / "out.txt").read_text() == "hello\n"
    assert server.breaks(program) == {}
    samples = await server.samples(program)
    main = next(sample for sample in samples if sample.kind == "main")
    words = server.renderer.decode(
        [token for token, sampled in zip(main.token_ids, main.sampled_mask, strict=True) if sampled]
    )
    # All four turns, both parallel calls of the third among them, in one line of tokens.
    for part in ("echo hello > out.txt", "cat out.txt", "ls", "pwd", "Step 0.", "Step 2."):
        assert part in words
    assert words.count("<|im_end|>") == 4
    # Beside the main line there is a title at most, and that is a side call of it.
    assert lineage(samples[1:]) in ({}, {0: ("auxiliary", main.branch)})


async def test_the_sdk_of_anthropic_gets_every_event_it_needs(
    server: DialectServer, sandbox: Sandbox
) -> None:
    ended = await play(sandbox, "anthropic", f"{server.url}/sessions/anthropic-events")
    words = json.loads(ended.check().output)
    assert (words["text"], words["stop"]) == ("All done.", "end_turn")
    assert words["counted"] > 10
    assert {"message_start", "content_block_stop", "signature", "input_json", "message_stop"} <= {
        *words["kinds"]
    }


async def test_codex_goes_on_where_it_was_when_it_is_resumed(
    server: DialectServer, sandbox: Sandbox
) -> None:
    url = f"{server.url}/sessions/resumed"
    (await sandbox.codex(url, TASK)).check()
    (await sandbox.codex(url, "resume", "--last", "Thanks")).check()
    assert server.breaks("resumed") == {}
    (sample,) = await server.samples("resumed")
    assert (sample.kind, sample.parent, sample.harness) == ("main", None, "codex")
    assert "You are welcome." in server.renderer.decode(sample.token_ids)


@pytest.mark.parametrize("program", ["codex", "opencode-messages"])
async def test_an_error_of_the_server_is_tried_again_and_leaves_no_trace(
    server: DialectServer, sandbox: Sandbox, program: str
) -> None:
    session = f"retried-{program}"
    url = f"{server.url}/sessions/{session}"
    (await play(sandbox, program, url, "It fails once. " + TASK)).check()
    assert server.breaks(session) == {}
    assert (sandbox.work / "out.txt").read_text() == "hello\n"
    # What failed on the server was never a turn: there is nothing of it to train or to leave out.
    assert {sample.kind for sample in await server.samples(session)} <= {"main", "auxiliary"}


async def test_a_fork_of_codex_shares_the_turns_of_its_parent(
    server: DialectServer, sandbox: Sandbox
) -> None:
    url = f"{server.url}/sessions/forked"
    begun = (await sandbox.codex(url, TASK)).check()
    thread = json.loads(begun.output.splitlines()[0])["thread_id"]
    (await sandbox.codex(url, "fork", thread, "Thanks a lot")).check()
    (await sandbox.codex(url, "resume", thread, "Thanks")).check()
    assert server.breaks("forked") == {}
    samples = await server.samples("forked")
    assert len(samples) == 2
    assert samples[1].trained_in, "what both share is trained in the first"
    assert lineage(samples) == {0: ("main", None), 4: ("fork", 0)}
    assert samples[1].evidence
    assert [sample.depth for sample in samples] == [0, 1]


async def test_a_sub_agent_of_codex_is_a_branch_beside_the_main_line(
    server: DialectServer, sandbox: Sandbox
) -> None:
    url = f"{server.url}/sessions/helped"
    ended = (await sandbox.codex(url, "Find the bug with a helper.")).check()
    assert "Done with the helper." in ended.output
    assert server.breaks("helped") == {}
    samples = await server.samples("helped")
    words = [server.renderer.decode(sample.token_ids) for sample in samples]
    (child,) = [text for text in words if "child report: add subtracts<|im_end|>" in text]
    (main,) = [text for text in words if "Done with the helper." in text]
    assert child != main
    assert not any(sample.trained_in for sample in samples)
    assert sorted(lineage(samples).values()) == [("main", None), ("subagent", 0)]
    (evidence,) = [sample.evidence for sample in samples if sample.kind == "subagent"]
    assert "x-codex-parent-thread-id" in evidence


async def test_a_compaction_of_codex_begins_a_new_branch(
    server: DialectServer, sandbox: Sandbox
) -> None:
    url = f"{server.url}/sessions/compacted"
    ended = (await sandbox.codex(url, TASK, compact_at=20_000)).check()
    assert "Done after the summary." in ended.output
    assert server.breaks("compacted") == {"tools_changed": 1}
    samples = await server.samples("compacted")
    words = [server.renderer.decode(sample.token_ids) for sample in samples]
    # The turns before, the request for a summary, and what goes on from it.
    kinds = {
        sample.kind: text.count("the summary so far")
        for sample, text in zip(samples, words, strict=True)
    }
    assert kinds == {"main": 0, "auxiliary": 1, "compaction": 1}
    (after,) = [sample for sample in samples if sample.kind == "compaction"]
    assert (after.parent, after.depth) == (0, 1)
    assert "x-codex-window-id" in after.evidence


@pytest.mark.parametrize("program", ["opencode-chat", "opencode-messages", "qwen-chat"])
async def test_a_child_is_a_branch_of_the_one_that_started_it(
    server: DialectServer, sandbox: Sandbox, program: str
) -> None:
    session = f"child-{program}"
    ended = await play(
        sandbox, program, f"{server.url}/sessions/{session}", "Find the bug with a child."
    )
    assert "Done with the child." in ended.check().output
    assert server.breaks(session) == {}
    samples = await server.samples(session)
    main = next(sample for sample in samples if sample.kind == "main")
    (child,) = [sample for sample in samples if sample.kind == "subagent"]
    assert (child.parent, child.depth) == (main.branch, main.depth + 1)
    assert "child report: add subtracts<|im_end|>" in server.renderer.decode(child.token_ids)
    # opencode says whose child it is; with Qwen Code it is seen by the call that made it.
    seen = "x-parent-session-id" if program.startswith("opencode") else "its task is in call"
    assert seen in child.evidence
    others = {sample.kind for sample in samples} - {"main", "subagent"}
    assert others <= {"auxiliary"}


async def test_a_compaction_of_qwen_code_begins_a_new_branch(
    server: DialectServer, sandbox: Sandbox
) -> None:
    url = f"{server.url}/sessions/compacted-qwen"
    ended = await sandbox.qwen(url, "openai", TASK, window=WINDOW)
    assert "Done after the summary." in ended.check().output
    samples = {sample.kind: sample for sample in await server.samples("compacted-qwen")}
    assert set(samples) == {"main", "auxiliary", "compaction"}
    assert samples["compaction"].parent == samples["main"].branch
    assert "it follows the summary" in samples["compaction"].evidence
    assert samples["main"].breaks == ()
    words = server.renderer.decode(samples["compaction"].token_ids)
    assert "Done after the summary." in words
