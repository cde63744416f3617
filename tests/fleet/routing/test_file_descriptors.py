"""A gateway that runs out of file descriptors does not blame its workers."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.backends.scripted import Request, models, serving, whole

CHILD = """
import asyncio, os, resource, sys
import uvloop
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.routing.affinity import Affinity
from lockstep.tokens.errors import Busy

async def main(url):
    async with Pool(probe_seconds=0.1) as pool:
        await pool.add(url, transport="vllm")
        (worker,) = pool.workers
        assert worker.state == "serving", worker.reason
        free = len(os.listdir("/proc/self/fd")) + 4
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
        held = []
        for _ in range(10):  # probes of its health fail meanwhile
            try:
                while True:
                    held.append(os.dup(0))
            except OSError:
                await asyncio.sleep(0.1)
        busy = False
        try:
            await pool.run(Affinity.of([1]), lambda worker: worker.transport.models())
        except Busy:
            busy = True
        state = worker.state
        for one in held:
            os.close(one)
        print(busy, state)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main(sys.argv[1]))
"""


@pytest.mark.failure_mode("F35")
async def test_a_worker_is_not_ejected_because_this_process_has_no_file_descriptor() -> None:
    def script(request: Request):
        # Nothing is kept open, so that every call needs a descriptor.
        reply = models() if request.path == "/v1/models" else whole({})
        return type(reply)(reply.parts, reply.status, fault="goodbye")

    async with serving(script) as server:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, server.url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, log = await child.communicate()
    assert out.decode().split() == ["True", "serving"], log.decode()
