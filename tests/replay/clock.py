"""An environment whose rewards depend on the clock."""

from __future__ import annotations

from time import time

from lockstep.train.envs.bundled import Reverse
from lockstep.train.envs.environment import Reward, RolloutContext, Task


class Clock(Reverse):
    """Tasks as in `reverse`; the reward is for being early."""

    deterministic = False

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        await context.chat(task).send(list(task.messages))
        return Reward(1.0 / time(), False)
