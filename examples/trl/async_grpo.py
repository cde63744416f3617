"""TRL's AsyncGRPOTrainer with rollouts and weight updates of a Lockstep fleet, on a CPU too.

lockstep serve tiny --workers 2
python examples/trl/async_grpo.py --steps 10
"""

import argparse
import itertools

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from lockstep.integrations.trl import (
    LockstepRolloutWorker,
    LockstepWeightTransfer,
    ServedPolicy,
    enable_cpu,
)
from lockstep.models import bundled
from lockstep.train import CALC_TOOL, Calc, run_calc


def reward(prompts, completions, answer, **_):
    """1 for the right number at the end, a fifth for a call of the tool."""
    return [
        1.0 if messages[-1]["content"] == right else 0.2 * (len(messages) > 1)
        for messages, right in zip(completions, answer, strict=True)
    ]


async def play(chat, row):
    """Two turns: the question, and what the calculator said."""
    turn = await chat.send(row["prompt"])
    if turn.tool_calls:
        results = [run_calc(call.arguments)[0] for call in turn.tool_calls]
        await chat.send_tool_results(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    rows = [
        {"prompt": list(task.messages), "answer": task.facts["answer"]}
        for task in itertools.islice(Calc().tasks("train", seed=1), 256)
    ]
    model = str(bundled("tiny"))
    enable_cpu()
    policy = ServedPolicy(options.url, checkpoints="runs/async/lockstep")
    trainer = AsyncGRPOTrainer(
        model=model,
        args=AsyncGRPOConfig(
            output_dir="runs/async", max_steps=options.steps, use_cpu=True, bf16=False,
            dtype="float32", gradient_checkpointing=False, token_budget=512, num_generations=8,
            max_staleness=2, learning_rate=1e-4, logging_steps=1, report_to=[], save_strategy="no",
        ),
        train_dataset=Dataset.from_list(rows),
        rollout_worker=LockstepRolloutWorker(
            policy, rows, reward, num_generations=8, max_staleness=2, play=play,
            call_tools=[CALC_TOOL], temperature=1.0, max_tokens=48,
        ),
        weight_transfer=LockstepWeightTransfer(policy, model),
    )  # fmt: skip
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            stale = entry["sample/staleness_max"]
            print(f"step {entry['step']}: reward {entry['reward']:.3f}, at most {stale:.0f} old")


if __name__ == "__main__":
    main()
