"""Real agents whose stream is cut: they end their task, and every token is accounted for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from lockstep.ledger.cut_turns import sampled_once
from lockstep.models import bundled
from lockstep.scripted.responder import Responder
from lockstep.scripted.script import Rule, Script, ScriptedCall
from lockstep.tokens import Sample
from tests.agents.programs import Sandbox
from tests.agents.test_agents import OPENCODE, QWEN, play
from tests.gateway.dialects import DialectServer, dialect_server, scripted_worker
from tests.processes import WorkerProcess

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.failure_mode("F98"),
]
PROGRAMS = ("codex", *OPENCODE, *QWEN)
TASK = "Write hello to out.txt, then read it back."
TOOLS = {
    "codex": ("exec_command", "cmd", {}),
    "opencode": ("bash", "command", {"description": "x"}),
}
QWEN_TOOL = ("run_shell_command", "command", {"description": "x", "is_background": False})
THOUGHT, TEXT = "Step 0.", "I write the file now, and then I read it back again."


def calls(program: str, *commands: str) -> list[dict[str, Any]]:
    tool, key, more = TOOLS.get(program.partition("-")[0], QWEN_TOOL)
    return [{"name": tool, "arguments": {key: command, **more}} for command in commands]


def tokens(**reply: Any) -> int:
    """Number of tokens of a reply, without the one that ends it."""
    reply["calls"] = [ScriptedCall(**call) for call in reply.get("calls", ())]
    responder = Responder(Script([Rule(**reply)]), bundled("tiny") or Path())
    return len(responder.take([0]).token_ids) - 1


def cut_rules(program: str) -> list[dict[str, Any]]:
    """A turn that is cut in its text, and one that is cut in its second call."""
    tool, _, _ = TOOLS.get(program.partition("-")[0], QWEN_TOOL)
    when = {"prompt": [f"Cut {program}:", f'"name": "{tool}"']}
    two = calls(program, "cat out.txt", "pwd")
    half = tokens(think=THOUGHT, say=TEXT[: len(TEXT) // 2])
    rest = tokens(think="Step 1.", calls=two[:1]) + 5
    steps: list[dict[str, Any]] = [
        {"think": THOUGHT, "say": TEXT, "error": {"after_tokens": half}},
        {"think": "Step 1.", "calls": calls(program, "echo hello > out.txt")},
        {"think": "Step 1.", "calls": two, "error": {"after_tokens": rest}},
        {"think": "Step 2.", "calls": calls(program, "ls")},
    ]
    return [
        *({"when": when, "times": 1, **step} for step in steps),
        {"when": when, "say": "All done."},
    ]


def rules() -> list[dict[str, Any]]:
    return [
        *(rule for program in PROGRAMS for rule in cut_rules(program)),
        {"say": "A title"},
    ]


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


async def accounted(server: DialectServer, session: str) -> list[Sample]:
    """The samples of a session, in which each sampled token is trained once, or masked in a branch
    that says why."""
    samples = await server.samples(session)
    cached = server.sessions.cache.find(session)
    assert cached is not None
    left = sampled_once(cached.ledger.nodes)
    masked = 0
    for sample in samples:
        own = [node for node in cached.ledger.nodes[sample.turn_index].path()
               if node.index >= (sample.branch or 0)]  # fmt: skip
        count = sum(left[node.index] for node in own)
        if sample.kind == "retry":
            assert (any(sample.sampled_mask), bool(sample.evidence)) == (False, True)
            masked += count
        else:
            assert sum(sample.sampled_mask) == sum(len(node.sampled) for node in own)
    assert sum(sum(sample.sampled_mask) for sample in samples) + masked == sum(left.values())
    return samples


@pytest.mark.parametrize("program", PROGRAMS)
async def test_an_agent_survives_cut_turns_and_each_token_is_accounted_for(
    server: DialectServer, sandbox: Sandbox, program: str
) -> None:
    session = f"cut-{program}"
    ended = await play(
        sandbox, program, f"{server.url}/sessions/{session}", f"Cut {program}: {TASK}"
    )
    ended.check()
    assert (sandbox.work / "out.txt").read_text() == "hello\n"
    assert server.breaks(session) == {}
    samples = await accounted(server, session)
    (main,) = [sample for sample in samples if sample.kind == "main"]
    assert "All done." in server.renderer.decode(main.token_ids)
    assert {sample.kind for sample in samples} <= {"main", "retry", "auxiliary"}
