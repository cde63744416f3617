"""GRPOTrainer on a task, alone or on a gateway: seconds a step, as JSON.

Run by benchmarks.trainers with the Python that has TRL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from time import perf_counter
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from benchmarks.measure import cpu_seconds, tree
from benchmarks.trainer_tasks import GROUP_SIZE, GROUPS, LEARNING_RATE, TASKS, reverse_reward
from lockstep.integrations.trl import LockstepGeneration
from lockstep.models import bundled
from lockstep.train.envs.bundled import run_calc
from lockstep.train.envs.environment import load_environment


def reverse(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    texts = [completion[-1]["content"] for completion in completions]
    return [reverse_reward(text, right) for text, right in zip(texts, answer, strict=True)]


def two_turns(
    completions: list[Any], answer: list[str], expression: list[str], **_: Any
) -> list[float]:
    """As the calc environment: parts of the credit are for a call, and for the right one."""
    rewards = []
    for messages, right, wanted in zip(completions, answer, expression, strict=True):
        calls = messages[0].get("tool_calls") or []
        if len(calls) != 1 or calls[0]["function"]["name"] != "calc":
            rewards.append(0.0)
            continue
        called = run_calc(calls[0]["function"]["arguments"])[1] == wanted
        solved = messages[-1]["role"] == "assistant" and messages[-1]["content"] == right
        rewards.append(1.0 if solved and len(messages) == 3 else 0.2 + 0.2 * called)
    return rewards


def calc(expression: str) -> str:
    """
    Evaluate an arithmetic expression.

    Args:
        expression: The expression.

    Returns:
        Its value.
    """
    return run_calc({"expression": expression})[0]


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each step ended, on the wall and in CPU time: of this process, and of the gateway."""

    def __init__(self, served: int | None) -> None:
        self.served = served
        self.marks: list[tuple[float, float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._mark()

    def _mark(self) -> None:
        served = 0.0 if self.served is None else sum(map(cpu_seconds, tree(self.served)))
        self.marks.append((perf_counter(), cpu_seconds(os.getpid()), served))

    def steps(self) -> list[list[float]]:
        """What each step took: on the wall, of this process, of the gateway."""
        return [
            [after - before for before, after in itertools.pairwise(column)]
            for column in zip(*self.marks, strict=True)
        ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url")
    parser.add_argument("--admin-url")
    parser.add_argument("--token")
    parser.add_argument("--served-pid", type=int, help="of the gateway")
    parser.add_argument("--task", choices=TASKS, default="short")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    task = TASKS[options.task]
    steps = options.steps or task.steps
    tasks = load_environment(task.env, task.options).tasks("train", seed=1)
    rows = [
        {"prompt": list(each.messages), **each.facts}
        for each in itertools.islice(tasks, GROUPS * steps)
    ]
    tokenizer = AutoTokenizer.from_pretrained(bundled("tiny"))
    with_tool: dict[str, Any] = {"reward_funcs": reverse}
    if task.env == "calc":
        with_tool = {"reward_funcs": two_turns, "tools": [calc]}
        # TRL reads tool calls of templates it knows, of which this is one by its form, and wants a
        # turn to stay as it was when others follow: no empty thought is put before the last one.
        tokenizer.response_template = qwen3_template
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "(in_window and (is_last or reasoning))", "(in_window and reasoning)"
        )
    clock = Clock(options.served_pid)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as output:
        trainer = GRPOTrainer(
            model=str(bundled("tiny")),
            processing_class=tokenizer,
            args=GRPOConfig(
                output_dir=output, max_steps=steps, use_cpu=True, bf16=False,
                model_init_kwargs={"dtype": "float32"}, gradient_checkpointing=False,
                per_device_train_batch_size=GROUPS * GROUP_SIZE, num_generations=GROUP_SIZE,
                max_completion_length=task.tokens, temperature=task.temperature,
                max_tool_calling_iterations=1, learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant", logging_steps=1, report_to=[], save_strategy="no",
                disable_tqdm=True, seed=1,
            ),
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
            **with_tool,
        )  # fmt: skip
        if options.url is not None:
            lockstep = LockstepGeneration(
                options.url, admin_url=options.admin_url, admin_token=options.token
            )
            lockstep.attach(trainer)
        trainer.train()
        if options.url is not None:
            lockstep.close()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    off = [entry.get("sampling/sampling_logp_difference/max", 0.0) for entry in logged]
    wall, cpu, served = clock.steps()
    result = {
        "wall": wall,
        "cpu": cpu,
        "served_cpu": served,
        "reward": [entry["reward"] for entry in logged],
        "tokens": [entry["completions/mean_length"] for entry in logged],
        "mismatch": max(off),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
