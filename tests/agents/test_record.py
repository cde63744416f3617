"""`lockstep record` with real agents at a real gateway, and the page that shows it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.programs import PATH, Sandbox
from tests.agents.script import rules
from tests.docs.blocks import runnable
from tests.docs.page_runner import reading
from tests.processes import TOKEN, ServeProcess

pytestmark = pytest.mark.timeout(300)
TASK = "Write hello to out.txt, then read it back."
COMMANDS = {
    "codex": ("codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access", TASK),
    "opencode": ("opencode", "run", "--auto", TASK),
    "qwen": ("qwen", "--yolo", TASK),
    "mini": ("mini", "-y", "--exit-immediately", "-l", "0", "-t", TASK, "-o", "traj.json"),
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, rules())))
    process = ServeProcess("--sessions", "memory", "--worker-args", f"--script {script}")
    yield process
    process.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("agent", COMMANDS)
async def test_an_agent_is_recorded_without_a_configuration_of_its_own(
    gateway: ServeProcess, tmp_path: Path, agent: str
) -> None:
    sandbox = await Sandbox.make(tmp_path)
    # The gateway is found in the registry of this user, as on a laptop.
    ended = await sandbox.run(
        [sys.executable, "-m", "lockstep", "record", "--json", "--", *COMMANDS[agent]],
        XDG_STATE_HOME=os.environ["XDG_STATE_HOME"],
        LOCKSTEP_ADMIN_URL=gateway.admin_url,
        LOCKSTEP_ADMIN_TOKEN=TOKEN,
    )
    ended.check()
    assert (sandbox.work / "out.txt").read_text() == "hello\n"
    summary = json.loads(ended.output.splitlines()[-1])
    (main,) = [branch for branch in summary["branches"] if branch["kind"] == "main"]
    assert main["turns"] == 4
    assert main["trainable"] == main["sampled"] > 0


def test_the_lines_of_the_page_work_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{PATH}:{os.environ['PATH']}")
    with reading(tmp_path) as reader:
        for block in runnable("docs/agents.md", "agents"):
            reader.run(block)
        (line,) = (reader.directory / "first.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "main"
