"""Real workers under a supervisor: killed under load, they come back and no request is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.backends.transport import GenerateRequest
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.launch.supervisor import Child
from lockstep.launch.workers import embedded_workers
from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import BadRequest, EngineFailure
from tests.fleet.fakes import until
from tests.processes import TOKEN


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def generate(pool: Pool, affinity: Affinity, request: GenerateRequest) -> Completion:
    async def call(worker: Worker) -> Completion:
        (completion,) = await worker.transport.generate(request)
        return completion

    return await pool.run(affinity, call)


@pytest.mark.failure_mode("F35")
async def test_a_worker_killed_under_load_comes_back_and_no_request_is_lost() -> None:
    restarted: list[Child] = []
    arguments = ("--max-model-len", "256", "--max-num-seqs", "16")

    async with (
        Pool(probe_seconds=0.2) as pool,
        embedded_workers(
            "tiny", 2, admin_token=TOKEN, arguments=arguments, on_restart=restarted.append
        ) as fleet,
    ):
        await fleet.ready()
        for child in fleet.children:
            await pool.add(child.url, worker_id=child.id)
        victim = fleet.children[0]
        before = (victim.url, victim.system_url, victim.pid)
        enough = asyncio.Event()
        pairs: list[tuple[GenerateRequest, Completion]] = []

        async def conversation(number: int) -> None:
            """One request after the other, until the victim has come back and generates again."""
            turn = 0
            while not enough.is_set():
                turn += 1
                prompt = [5 + number, 6, 7, 8 + turn % 50]
                sampling = Sampling(max_tokens=24, seed=turn, ignore_eos=True)
                request = GenerateRequest(prompt_ids=prompt, sampling=sampling)

                completion = await generate(pool, Affinity(session=f"s{number}"), request)
                assert len(completion.token_ids) == 24
                pairs.append((request, completion))

        tasks = [asyncio.create_task(conversation(number)) for number in range(8)]
        await until(lambda: {completion.worker for _, completion in pairs} == {"w0", "w1"}, 30)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        await until(lambda: pool.workers[0].state == "down", 10)
        await until(lambda: bool(restarted), 60)
        await pool.wait_ready(2, 30)
        seen = len(pairs)
        await until(lambda: any(completion.worker == "w0" for _, completion in pairs[seen:]), 30)
        enough.set()
        await asyncio.gather(*tasks)  # raises what any request raised

        for request, completion in pairs[:: len(pairs) // 10]:
            again = await generate(pool, Affinity(worker="w0"), request)
            assert (again.token_ids, again.logprobs) == (completion.token_ids, completion.logprobs)
        assert restarted == [victim]
        assert (victim.url, victim.system_url) == before[:2]
        assert victim.pid != before[2]
        assert (victim.restarts, victim.state) == (1, "running")
        pids = [child.pid for child in fleet.children]
    assert [child.state for child in fleet.children] == ["stopped", "stopped"]
    assert not any(alive(pid) for pid in pids if pid is not None)


async def test_a_worker_that_cannot_start_fails_the_start() -> None:
    async with embedded_workers("/no/such/model", 1, admin_token=TOKEN) as fleet:
        with pytest.raises(EngineFailure, match="ended with code 2 before it was ready"):
            await fleet.ready()
    assert fleet.children[0].restarts == 0


def test_a_supervisor_needs_at_least_one_worker() -> None:
    with pytest.raises(BadRequest, match="workers is 0"):
        embedded_workers("tiny", 0, admin_token=TOKEN)


CHILD = """
import os, sys, time
from lockstep.launch.parent_watch import exit_with_parent
exit_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], start_new_session=True)
time.sleep(600)
"""


def test_a_worker_ends_when_its_gateway_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        assert parent.stdout.read() == b""  # the worker holds the other end until it ends


async def test_a_worker_does_not_import_modules_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenize.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.chdir(tmp_path)
    async with embedded_workers("tiny", 1, admin_token=TOKEN) as fleet:
        await fleet.ready()
