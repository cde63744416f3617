"""GRPOTrainer on the reverse task, alone or on a gateway: seconds a step, as JSON.

Run by benchmarks.trainers with the Python that has TRL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import tempfile
from time import perf_counter
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from lockstep.integrations.trl import LockstepGeneration
from lockstep.models import bundled
from lockstep.train.envs.bundled import Reverse


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [completion[-1]["content"] for completion in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each step ended, on the wall and in this process's CPU time."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._mark()

    def _mark(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.wall.append(perf_counter())
        self.cpu.append(used.ru_utime + used.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url")
    parser.add_argument("--admin-url")
    parser.add_argument("--token")
    parser.add_argument("--close", action="store_true", help="TRL computes as it always does")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    tasks = itertools.islice(Reverse().tasks("train", seed=1), 16 * options.steps)
    rows = [{"prompt": list(task.messages), "answer": task.facts["answer"]} for task in tasks]
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as output:
        trainer = GRPOTrainer(
            model=str(bundled("tiny")),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=output, max_steps=options.steps, use_cpu=True, bf16=False,
                model_init_kwargs={"dtype": "float32"}, gradient_checkpointing=False,
                per_device_train_batch_size=128, num_generations=8, max_completion_length=48,
                learning_rate=1e-4, lr_scheduler_type="constant", logging_steps=1,
                report_to=[], save_strategy="no", disable_tqdm=True, seed=1,
            ),
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        )  # fmt: skip
        if options.url is not None:
            lockstep = LockstepGeneration(
                options.url, admin_url=options.admin_url, admin_token=options.token
            )
            lockstep.attach(trainer, exact=False if options.close else None)
        trainer.train()
        if options.url is not None:
            lockstep.close()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    off = [entry.get("sampling/sampling_logp_difference/max", 0.0) for entry in steps]
    result = {
        "wall": [b - a for a, b in itertools.pairwise(clock.wall)],
        "cpu": [b - a for a, b in itertools.pairwise(clock.cpu)],
        "reward": [entry["reward"] for entry in steps],
        "mismatch": max(off),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
