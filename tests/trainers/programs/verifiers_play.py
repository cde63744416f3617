"""Plays tasks of an environment of verifiers on a gateway; prints traces and their samples."""

import asyncio
import json
import sys

import lockstep
from lockstep.integrations.verifiers import VerifiersEnvironment
from lockstep.train.envs.environment import RolloutContext

url, dialect, turns = sys.argv[1:4]
harness = {
    "id": "reverse-v1",
    "dialect": dialect,
    "turns": int(turns),
    "stream": "--stream" in sys.argv,
}


async def main():
    env = VerifiersEnvironment("reverse-v1", agent={"harness": harness})
    traces = []
    run = env._env.run_episode

    async def watched(*args, **options):
        episode = await run(*args, **options)
        traces.extend(episode.traces)
        return episode

    env._env.run_episode = watched
    async with lockstep.connect(url) as policy:
        contexts = [RolloutContext(policy, temperature=1.0, max_tokens=24) for _ in range(3)]
        tasks = env.tasks("train", 0)
        rewards = await asyncio.gather(*(env.rollout(next(tasks), context) for context in contexts))
    print(
        json.dumps(
            {
                "rewards": [reward.value for reward in rewards],
                "branches": [len(trace.branches) for trace in traces],
                "turns": [trace.info["lockstep"]["turns"] for trace in traces],
                "sessions": [trace.id for trace in traces],
                "samples": [
                    [json.loads(sample.to_json()) for sample in context.samples(train_aborted=True)]
                    for context in contexts
                ],
            }
        )
    )


asyncio.run(main())
