"""A gateway that is killed loses no turn that it had answered."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from lockstep.gateway.sessions.sessions import Sessions
from lockstep.render import Renderer
from lockstep.storage.sqlite.sessions import SqliteSessionStore
from tests.gateway.sessions.test_sessions import MORE, QUESTION, say

SESSIONS = 8


async def commit_for_ever(path: str) -> None:
    """Commits turns in many sessions, and says so after each: `session turns`."""
    renderer = Renderer.load("tiny")

    async def talk(name: str) -> None:
        messages: list[object] = [QUESTION]
        turns = 0
        while True:
            await say(await sessions.open(name, renderer), renderer, messages, f"answer {turns}")
            turns += 1
            sys.stdout.write(f"{name} {turns}\n")
            sys.stdout.flush()
            messages.append(MORE)

    async with Sessions(SqliteSessionStore(path)) as sessions:
        await asyncio.gather(*(talk(f"s{at}") for at in range(SESSIONS)))


def run_and_kill(path: str) -> dict[str, int]:
    """How many turns of each session were answered before the kill."""
    command = [sys.executable, "-m", "tests.gateway.sessions.test_crash", path]
    answered: dict[str, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise RuntimeError("no output to read")
        try:
            while sum(answered.values()) < 60:
                name, turns = process.stdout.readline().split()
                answered[name] = int(turns)
        finally:
            process.kill()
        for line in process.stdout.read().splitlines(keepends=True):
            if line.endswith("\n"):
                name, turns = line.split()
                answered[name] = int(turns)
    return answered


async def test_a_kill_loses_no_turn_whose_reply_was_sent(tmp_path: Path) -> None:
    path = str(tmp_path / "sessions.db")
    answered = run_and_kill(path)
    assert len(answered) == SESSIONS
    async with Sessions(SqliteSessionStore(path)) as sessions:
        for name, count in answered.items():
            assert (await sessions.info(name)).turns >= count
            (sample,) = await sessions.samples(name)
            # One span a turn: none is missing, none was cut.
            assert len(sample.versions) >= count


if __name__ == "__main__":
    asyncio.run(commit_for_ever(sys.argv[1]))
