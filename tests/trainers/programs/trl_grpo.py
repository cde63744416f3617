"""TRL's GRPOTrainer or RLOOTrainer on a gateway: three steps of the reverse task.

Prints what it logged. With --resume it trains again from the checkpoint of its second step.
"""

import argparse
import json
import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

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
parser.add_argument("--rloo", action="store_true")
parser.add_argument("--shard", action="store_true")
parser.add_argument("--resume", action="store_true")
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

Config, Trainer = (RLOOConfig, RLOOTrainer) if options.rloo else (GRPOConfig, GRPOTrainer)
masks = []


def record_masks(produce):
    def record(inputs):
        output = produce(inputs)
        mask = output["completion_mask"] if "tool_mask" not in output else output["tool_mask"]
        masks.extend(row.tolist() for row in mask)
        return output

    return record


def record_ids(generate, sampled):
    def record(*arguments, **named):
        output = generate(*arguments, **named)
        sampled.append(output[1])
        return output

    return record


def train(resume_from=None):
    """Train, and return the trainer and the ids that each of its steps sampled."""
    lockstep = LockstepGeneration(
        options.url, admin_url=options.admin_url, admin_token=options.token
    )
    peft = None
    if options.lora:
        from peft import LoraConfig

        modules = ["q_proj", "v_proj"]
        peft = LoraConfig(r=4, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM")
    arguments = {}
    if options.tools:
        arguments["rollout_func"] = lockstep.rollout_func(calc, call_tools=[CALC_TOOL])
    trainer = Trainer(
        model=str(bundled("tiny")),
        reward_funcs=reward,
        args=Config(
            output_dir=options.output, max_steps=options.steps, use_cpu=True, bf16=False,
            model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=8,
            num_generations=4, max_completion_length=64 if options.tools else 24,
            temperature=options.temperature, top_k=options.top_k, learning_rate=1e-4,
            logging_steps=1, report_to=[], save_strategy="steps" if options.resume else "no",
            save_steps=2, disable_tqdm=True, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(rows * 8),
        peft_config=peft,
        **arguments,
    )  # fmt: skip
    if options.tools:
        trainer._generate_and_score_completions = record_masks(
            trainer._generate_and_score_completions
        )
    exact = False if options.close else True if options.exact else None
    lockstep.attach(trainer, exact=exact, shard=options.shard)
    sampled = []
    lockstep.generate = record_ids(lockstep.generate, sampled)
    trainer.train(resume_from_checkpoint=resume_from)
    lockstep.close()
    return trainer, sampled


trainer, sampled = train()
again = train(f"{options.output}/checkpoint-2")[1] if options.resume else []
if trainer.accelerator.is_main_process:
    print(json.dumps({"log": trainer.state.log_history, "versions": seen, "masks": masks,
                      "turns": turns, "sampled": sampled, "resumed": again}))  # fmt: skip
