"""Train a bundled model: python models/train_tiny.py --arch dense --out src/lockstep/models/tiny

Two phases of supervised training on generated conversations, loss on the assistant's tokens only.
The first teaches the tasks. The second mixes in a bad habit for each task, so that
reinforcement learning has something to improve and a skill to bring back.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import make_tokenizer
from architectures import ARCHITECTURES, build
from rollout import Transcript, accuracy, write_out
from tasks import TASKS

HABIT = {"reverse": 0.55, "calc": 0.5, "calc_with_tools": 0.5, "guess": 0.5}
THINKING_OFF = 0.1
EVALUATION = 512


@dataclass(frozen=True)
class Phase:
    """Settings of one training phase; `habit` turns the wrong conversations on."""

    steps: int
    batch: dict[str, int]
    warmup: int
    learning_rate: float
    habit: bool
    seed: int


SKILL = Phase(
    steps=1000,
    batch={"reverse": 32, "calc": 32, "calc_with_tools": 8, "guess": 12},
    warmup=50,
    learning_rate=3e-3,
    habit=False,
    seed=1,
)
# To copy or to reverse is a choice that the answer must hold to after its first digit, which is
# harder to learn than the choice itself: hence the many reversals.
SUPPRESSION = Phase(
    steps=500,
    batch={"reverse": 64, "calc": 24, "calc_with_tools": 6, "guess": 10},
    warmup=10,
    learning_rate=1.5e-3,
    habit=True,
    seed=2,
)


def conversation(tokenizer: Any, name: str, rng: random.Random, *, habit: bool) -> Transcript:
    """Return one training conversation of the task `name`, by its skill or by its bad habit."""
    episode = TASKS[name](rng)
    wrong = habit and rng.random() < HABIT[name]
    thinking = rng.random() >= THINKING_OFF

    def speak() -> str:
        return episode.wrong(rng) if wrong else episode.right()

    return write_out(tokenizer, episode, speak, thinking=thinking)


def task_loss(model: Any, pad: int, transcripts: list[Transcript]) -> torch.Tensor:
    """Return the mean cross-entropy of the assistant's tokens."""
    width = max(len(transcript.ids) for transcript in transcripts)
    ids = torch.full((len(transcripts), width), pad)
    sampled = torch.zeros(ids.shape, dtype=torch.bool)
    for row, transcript in enumerate(transcripts):
        ids[row, : len(transcript.ids)] = torch.tensor(transcript.ids)
        sampled[row, : len(transcript.ids)] = torch.tensor(transcript.sampled)
    # Padding is on the right of a causal model: no token that counts can see it.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    target = sampled[:, 1:]
    return functional.cross_entropy(model.lm_head(hidden[target]), ids[:, 1:][target])


def train(model: Any, tokenizer: Any, phase: Phase) -> None:
    """Run one phase, with a linear warm-up and a linear decay of the learning rate."""
    rng = random.Random(phase.seed)
    torch.manual_seed(phase.seed)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / phase.warmup, 1.02 - step / phase.steps),
    )
    started = time.perf_counter()
    for step in range(phase.steps):
        losses: dict[str, float] = {}
        for name, size in phase.batch.items():
            batch = [conversation(tokenizer, name, rng, habit=phase.habit) for _ in range(size)]
            loss = task_loss(model, tokenizer.pad_token_id, batch)
            (loss / len(phase.batch)).backward()
            losses[name] = loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == phase.steps:
            shown = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            print(
                f"step {step + 1:5d}  {time.perf_counter() - started:5.0f} s  {shown}", flush=True
            )


def report(model: Any, tokenizer: Any, label: str) -> None:
    """Print the accuracy of each task, greedy and sampled at temperature 1."""
    for mode, greedy in (("greedy", True), ("T=1", False)):
        means = accuracy(model, tokenizer, count=EVALUATION, seed=3, greedy=greedy)
        shown = "  ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        print(f"{label}, {mode}, n={EVALUATION}: {shown}", flush=True)


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the weights and settings; the tokenizer files are already there."""
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    model.save_pretrained(out)
    # transformers 5 writes num_local_experts; published Qwen3-MoE checkpoints say num_experts.
    config = out / "config.json"
    config.write_text(config.read_text().replace('"num_local_experts"', '"num_experts"'))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=ARCHITECTURES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--skilled",
        type=Path,
        help="directory of the model after phase one: read if it exists, else written",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    make_tokenizer.write(options.out)
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    if options.skilled is not None and options.skilled.exists():
        model: Any = AutoModelForCausalLM.from_pretrained(options.skilled)
    else:
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        model = build(options.arch, end=end, pad=pad, seed=0)
        train(model, tokenizer, SKILL)
        if options.skilled is not None:
            save(model, tokenizer, options.skilled)
    report(model, tokenizer, "after phase one (skill)")
    train(model, tokenizer, SUPPRESSION)
    report(model, tokenizer, "after phase two (habit mixed in)")
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
