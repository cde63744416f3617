"""TRL's GRPOTrainer teaches the bundled model to reverse digits, sampling from a Lockstep fleet.

lockstep serve tiny
python examples/trl/grpo.py --steps 20 --exact
"""

import argparse
import itertools

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from lockstep.integrations.trl import LockstepGeneration
from lockstep.models import bundled
from lockstep.train import Reverse


def reward(prompts, completions, answer, **_):
    """1 for the right digits, half of the share that is in place otherwise."""
    texts = [completion[-1]["content"] for completion in completions]
    return [
        1.0
        if text == right
        else 0.5 * sum(map(str.__eq__, text, right)) / max(len(right), len(text))
        for text, right in zip(texts, answer, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--exact", action="store_true", help="raise where it cannot be bit for bit")
    options = parser.parse_args()
    rows = [
        {"prompt": list(task.messages), "answer": task.facts["answer"]}
        for task in itertools.islice(Reverse().tasks("train", seed=1), 512)
    ]
    trainer = GRPOTrainer(
        model=str(bundled("tiny")),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir="runs/trl", max_steps=options.steps, use_cpu=True, bf16=False,
            model_init_kwargs={"dtype": "float32"}, gradient_checkpointing=False,
            per_device_train_batch_size=128, num_generations=8, max_completion_length=48,
            learning_rate=1e-4, logging_steps=1, report_to=[], save_strategy="no",
        ),
        train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    lockstep = LockstepGeneration(options.url)
    lockstep.attach(trainer, exact=options.exact or None)
    trainer.train()
    lockstep.close()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            off = entry["sampling/sampling_logp_difference/max"]
            print(f"step {entry['step']}: reward {entry['reward']:.3f}, logprobs off by {off:.1e}")


if __name__ == "__main__":
    main()
