"""TRL's GRPOTrainer on a gateway: three steps of the reverse task; prints what it logged."""

import argparse
import json
import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from lockstep.integrations.trl import LockstepGeneration
from lockstep.models import bundled
from lockstep.train.envs.bundled import CALC_TOOL, run_calc

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("admin_url")
parser.add_argument("token")
parser.add_argument("output")
parser.add_argument("--exact", action="store_true")
parser.add_argument("--close", action="store_true")
parser.add_argument("--top-k", type=int, default=0)
parser.add_argument("--tools", action="store_true")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--temperature", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=3)
options = parser.parse_args()

seen, turns = [], []


def reward(prompts, completions, answer, **columns):
    seen.extend(columns.get("weight_version") or [])
    turns.extend(columns.get("turns") or [])
    texts = [completion[-1]["content"] for completion in completions]
    return [
        float(text.endswith(right)) - 0.01 * len(text)
        for text, right in zip(texts, answer, strict=True)
    ]


async def calc(chat, prompt):
    turn = await chat.send(prompt)
    if turn.tool_calls:
        await chat.send_tool_results([run_calc(turn.tool_calls[0].arguments)[0]])
    return {"turns": len(chat.ledger.nodes)}


tasks = [("Reverse: 40213", "31204"), ("Reverse: 917", "719"), ("Reverse: 5820176", "6710285")]
if options.tools:
    tasks = [("What is 12 + 30?", "42"), ("What is 415 - 15?", "400"), ("What is 20 * 31?", "620")]
rows = [{"prompt": [{"role": "user", "content": task}], "answer": right} for task, right in tasks]

lockstep = LockstepGeneration(options.url, admin_url=options.admin_url, admin_token=options.token)
peft = None
if options.lora:
    from peft import LoraConfig

    peft = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = GRPOTrainer(
    model=str(bundled("tiny")),
    reward_funcs=reward,
    args=GRPOConfig(
        output_dir=options.output, max_steps=options.steps, use_cpu=True, bf16=False,
        model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=64 if options.tools else 24, temperature=options.temperature,
        top_k=options.top_k, learning_rate=1e-4, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    ),
    train_dataset=Dataset.from_list(rows * 8),
    rollout_func=lockstep.rollout_func(calc, call_tools=[CALC_TOOL]) if options.tools else None,
    peft_config=peft,
)  # fmt: skip
rows_seen, turns = [], []
if options.tools:
    produce = trainer._generate_and_score_completions

    def record(inputs):
        output = produce(inputs)
        mask = output["completion_mask"] if "tool_mask" not in output else output["tool_mask"]
        rows_seen.extend(row.tolist() for row in mask)
        return output

    trainer._generate_and_score_completions = record
lockstep.attach(trainer, exact=False if options.close else True if options.exact else None)
trainer.train()
lockstep.close()
if trainer.accelerator.is_main_process:
    print(json.dumps({"log": trainer.state.log_history, "versions": seen, "masks": rows_seen,
                      "turns": turns}))  # fmt: skip
