"""Lockstep's own loop on a task, against a gateway: seconds a step, as JSON.

Run by benchmarks.trainers in a process of its own, like benchmarks.trl_run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import tempfile
from time import perf_counter

from benchmarks.measure import cpu_seconds, tree
from benchmarks.trainer_tasks import GROUP_SIZE, GROUPS, LEARNING_RATE, TASKS
from lockstep.train.config import TrainConfig
from lockstep.train.loop import Trainer
from lockstep.train.records.step_metrics import StepMetrics


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--admin-url", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--served-pid", type=int, required=True, help="of the gateway")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--task", choices=TASKS, default="short")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    task = TASKS[options.task]
    wall: list[float] = []
    cpu: list[float] = []
    served: list[float] = []

    def mark(_: StepMetrics | None = None) -> None:
        wall.append(perf_counter())
        cpu.append(cpu_seconds(os.getpid()))
        served.append(sum(map(cpu_seconds, tree(options.served_pid))))

    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
        config = TrainConfig.of(
            {
                "run_dir": f"{directory}/run",
                "seed": 1,
                "serve": {
                    "url": options.url,
                    "admin_url": options.admin_url,
                    "admin_token": options.token,
                },
                "env": {"name": task.env, "options": dict(task.options)},
                "rollout": {
                    "groups": GROUPS,
                    "group_size": GROUP_SIZE,
                    "max_tokens": task.turn_tokens,
                    "temperature": task.temperature,
                },
                "learner": {"lr": LEARNING_RATE, "threads": options.threads},
                "loop": {
                    "mode": options.mode,
                    "steps": options.steps or task.steps,
                    "max_off_policy": 1,
                },
                "eval": {"prompts": 0},
            }
        )
        trainer = Trainer(config)
        result = asyncio.run(trainer.run(mark))
    # Tokens of older weights differ by what was learnt since, which says nothing of arithmetic.
    fresh = [step.more["mismatch_max"] for step in result.steps if not step.off_policy_max]
    measured = {
        "wall": [b - a for a, b in itertools.pairwise(wall)],
        "cpu": [b - a for a, b in itertools.pairwise(cpu)],
        "served_cpu": [b - a for a, b in itertools.pairwise(served)],
        "reward": [step.reward for step in result.steps],
        "tokens": [step.tokens / (GROUPS * GROUP_SIZE) for step in result.steps],
        "dropped": [step.dropped for step in result.steps],
        "mismatch": max(fresh, default=0.0),
        "parts": {
            part: [getattr(step, f"time_{part}") for step in result.steps]
            for part in ("rollout", "train", "save", "update")
        },
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
