"""Supervised processes: when they are ready, what restarts them, and that all are stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import uvloop

from lockstep.launch.interpreter import DYNAMO, VLLM, find_python
from lockstep.launch.supervisor import Child, Command, Supervisor, worker_names
from lockstep.tokens.errors import BadRequest, EngineFailure
from lockstep.tokens.exit_codes import TRY_AGAIN, WRONG
from tests.fleet.fakes import until

READY = """
import time
print("a library says hello")
print('{"event": "ready", "n": 7}', flush=True)
"""
FOR_EVER = "time.sleep(600)"


def running(script: str, **fields: bool) -> Command:
    return Command((sys.executable, "-c", script), **fields)  # type: ignore[arg-type]


async def test_a_child_is_ready_at_its_ready_line_whatever_it_wrote_before() -> None:
    ready: list[Child] = []
    supervisor = Supervisor(
        worker_names(2), lambda _: running(READY + FOR_EVER), on_ready=ready.append
    )
    async with supervisor:
        await supervisor.ready()
        assert {child.id for child in ready} == {"w0", "w1"}
        assert [child.ready.result()["n"] for child in ready] == [7, 7]
        assert {child.state for child in supervisor.children} == {"running"}
        pids = [child.pid for child in supervisor.children]
    assert {child.state for child in supervisor.children} == {"stopped"}
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("turns", range(4))
def test_a_child_that_is_being_started_is_ended_too(turns: int) -> None:
    """On the loop that a gateway runs on, which loses track of a process whose start is
    cancelled."""
    listed = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    others = set(listed.read_text().split())

    async def stopped_after(turns: int) -> None:
        async with Supervisor(worker_names(1), lambda _: running(READY + FOR_EVER)):
            while set(listed.read_text().split()) == others:
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)

    uvloop.run(stopped_after(turns))
    assert set(listed.read_text().split()) == others


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('print(\'{"event": "other"}\')', "instead of being ready"),
        ("print('{ no JSON')", "instead of being ready"),
        ("raise SystemExit(3)", "ended with code 3 before it was ready"),
    ],
)
async def test_a_child_that_does_not_become_ready_fails_the_start(
    script: str, message: str
) -> None:
    async with Supervisor(worker_names(1), lambda _: running(script)) as supervisor:
        with pytest.raises(EngineFailure, match=message):
            await supervisor.ready()


@pytest.mark.failure_mode("F35")
async def test_a_child_that_dies_is_restarted_once_its_dependencies_are_reachable() -> None:
    again: list[Child] = []
    command = running(READY + FOR_EVER)
    needed = asyncio.Event()
    needed.set()
    supervisor = Supervisor(
        worker_names(1), lambda _: command, before_start=needed.wait, on_restart=again.append
    )
    async with supervisor:
        await supervisor.ready()
        (one,) = supervisor.children
        url, pid = one.url, one.pid
        assert pid is not None
        needed.clear()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: one.restarts == 1)
        await asyncio.sleep(0.3)
        assert (one.state, one.pid, one.exit_code) == ("starting", None, -signal.SIGKILL)
        needed.set()
        await until(lambda: again == [one])
        assert (one.url, one.restarts, one.state) == (url, 1, "running")
        assert one.pid not in (None, pid)


@pytest.mark.parametrize(("code", "restarts"), [(WRONG, 0), (TRY_AGAIN, 1)])
async def test_only_a_child_whose_command_is_wrong_is_not_restarted(
    code: int, restarts: int
) -> None:
    dying = running(READY + f"\nraise SystemExit({code})")
    commands = iter((dying,))
    lasting = running(READY + FOR_EVER)
    async with Supervisor(worker_names(1), lambda _: next(commands, lasting)) as supervisor:
        await supervisor.ready()
        (one,) = supervisor.children
        await until(lambda: one.exit_code == code)
        await asyncio.sleep(0.5)
        assert one.restarts == restarts


async def test_a_child_without_a_ready_line_is_ready_once_it_runs() -> None:
    supervisor = Supervisor(
        ("quiet",), lambda _: running("import time; " + FOR_EVER, announces=False)
    )
    async with supervisor:
        await supervisor.ready()
        assert supervisor.children[0].state == "running"


async def test_a_child_that_ignores_the_request_to_stop_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.launch.supervisor.KILL_SECONDS", 0.1)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + FOR_EVER
    async with Supervisor(worker_names(1), lambda _: running(deaf), drain_seconds=0.1) as one:
        await one.ready()
        process = one.children[0].process
    assert process is not None
    assert process.returncode == -signal.SIGKILL


def test_the_python_of_an_engine_is_the_named_one_or_that_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_python(VLLM, sys.executable) == Path(sys.executable)
    own = tmp_path / ".venv-dynamo/bin/python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert find_python(DYNAMO) == own
    with pytest.raises(BadRequest, match=r"no vLLM at .*install-vllm\.sh, or set LOCKSTEP_VLLM"):
        find_python(VLLM)
    with pytest.raises(BadRequest, match=r"no Dynamo at /nowhere.*install-dynamo\.sh"):
        find_python(DYNAMO, "/nowhere/python")


async def test_a_child_that_stays_unhealthy_is_restarted() -> None:
    ill: set[int] = set()
    restarted: list[Child] = []

    async def healthy(child: Child) -> bool:
        return child.pid not in ill

    supervisor = Supervisor(
        worker_names(2), lambda _: running(READY + FOR_EVER),
        healthy=healthy, unhealthy_seconds=0.4, on_restart=restarted.append,
    )  # fmt: skip
    async with supervisor:
        await supervisor.ready()
        first, second = supervisor.children
        pids = first.pid, second.pid
        assert pids[0] is not None
        ill.add(pids[0])
        await until(lambda: bool(restarted))
        assert restarted == [first]
        assert first.pid not in (None, pids[0])
        assert (second.pid, second.restarts) == (pids[1], 0)
