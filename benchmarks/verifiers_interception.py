"""verifiers' interception server for one rollout, run by its own interpreter; see agent_peers.

    python verifiers_interception.py UPSTREAM_URL MODEL_DIRECTORY

Prints its base URL and key as JSON; a line on standard input has it print the rollout's branches.
"""

from __future__ import annotations

import asyncio
import json
import sys

from renderers import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import Sampling


def new_session(upstream: str, model: str) -> RolloutSession:
    client = TrainClientConfig(
        base_url=f"{upstream}/v1",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=model,
    )
    task = TraceTask.model_construct(type="Task", data=None)
    trace = Trace.model_construct(task=task, agent=AgentInfo.model_construct(config=None))
    return RolloutSession(
        ctx=ModelContext(model="m", client=client, sampling=Sampling(max_tokens=200)), trace=trace
    )


async def main() -> None:
    server = InterceptionServer()
    async with server:
        while True:
            session = new_session(*sys.argv[1:3])
            async with server.acquire(session) as (base, key, _):
                print(json.dumps({"url": base, "key": key}), flush=True)
                if not await asyncio.to_thread(sys.stdin.readline):
                    return
                rows = [
                    [list(branch.token_ids), sum(branch.sampled_mask)]
                    for branch in session.trace.branches
                ]
                print(json.dumps(rows), flush=True)


asyncio.run(main())
