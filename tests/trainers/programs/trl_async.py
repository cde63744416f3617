"""TRL's AsyncGRPOTrainer on a gateway: ten steps, in the fourth of which a worker is killed."""

import argparse
import json
import os
import signal

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from lockstep.integrations.trl import LockstepRolloutWorker, LockstepWeightTransfer, ServedPolicy
from lockstep.integrations.trl.cpu import enable_cpu
from lockstep.models import bundled

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("admin_url")
parser.add_argument("token")
parser.add_argument("output")
parser.add_argument("--kill", type=int)
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()


def reward(prompts, completions, answer, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    return [
        float(text == right) - 0.01 * len(text) for text, right in zip(texts, answer, strict=True)
    ]


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if options.kill and state.global_step == 4:
            os.kill(options.kill, signal.SIGKILL)


tasks = [("Reverse: 40213", "31204"), ("Reverse: 917", "719"), ("Reverse: 5820176", "6710285")]
rows = [{"prompt": [{"role": "user", "content": task}], "answer": right} for task, right in tasks]
model = str(bundled("tiny"))
enable_cpu()
policy = ServedPolicy(
    options.url, admin_url=options.admin_url, admin_token=options.token,
    checkpoints=f"{options.output}/lockstep",
)  # fmt: skip
worker = LockstepRolloutWorker(
    policy, rows, reward, num_generations=4, groups_per_step=2, max_staleness=2, max_tokens=24
)
pushed, taken = [], []
trainer = AsyncGRPOTrainer(
    model=model,
    args=AsyncGRPOConfig(
        output_dir=options.output, max_steps=options.steps, use_cpu=True, bf16=False,
        dtype="float32", per_device_train_batch_size=8, gradient_accumulation_steps=1,
        num_generations=4, max_staleness=2, learning_rate=1e-5, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, token_budget=96,
    ),
    train_dataset=Dataset.from_list(rows),
    rollout_worker=worker,
    weight_transfer=LockstepWeightTransfer(policy, model),
    callbacks=[Kill()],
)  # fmt: skip
put = worker.rollout_buffer.put


def record(row):
    taken.append(row.model_version)
    put(row)


worker.rollout_buffer.put = record
trainer.train()
print(json.dumps({"log": trainer.state.log_history, "versions": taken,
                  "labels": worker._versions}))  # fmt: skip
