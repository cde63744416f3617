"""A loop as the recipes of Tinker's cookbook have it, against `lockstep tinker`: seconds a step.

Run by benchmarks.trainers with the Python that has the SDK, and nothing of Lockstep: each step
takes a sampler of the newest weights, samples groups of answers to the short reverse task, and
learns from them in one call, with the optimizer's step sent along.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
from time import perf_counter

import tinker
from tinker import types

from benchmarks.measure import cpu_seconds, tree
from benchmarks.trainer_tasks import GROUP_SIZE, GROUPS, TASKS, reverse_reward
from examples.tinker.reverse import datum, difference

LEARNING_RATE = 2e-3
"""Of the adapter, which has few weights and begins at nothing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--served-pid", type=int, required=True, help="of the server")
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    task = TASKS["short"]
    service = tinker.ServiceClient()
    model, *_ = service.get_server_capabilities().supported_models
    client = service.create_lora_training_client(model.model_name, rank=16, seed=0)
    tokenizer = client.get_tokenizer()
    rng = random.Random(1)
    params = types.SamplingParams(max_tokens=task.turn_tokens, stop=[tokenizer.eos_token_id])
    adam = types.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8)
    marks: list[tuple[float, float, float]] = []
    rewards: list[float] = []
    worst = 0.0

    def mark() -> None:
        served = sum(map(cpu_seconds, tree(options.served_pid)))
        marks.append((perf_counter(), cpu_seconds(os.getpid()), served))

    mark()
    for _ in range(options.steps or task.steps):
        sampler = client.save_weights_and_get_sampling_client()
        calls = []
        for _ in range(GROUPS):
            digits = "".join(rng.choices("0123456789", k=rng.randint(3, 8)))
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"Reverse: {digits}"}],
                tokenize=False,
                add_generation_prompt=True,
            )
            prompt = tokenizer.encode(text, add_special_tokens=False)
            calls.append(
                (
                    digits,
                    prompt,
                    sampler.sample(types.ModelInput.from_ints(prompt), GROUP_SIZE, params),
                )
            )
        data: list[types.Datum] = []
        scores: list[float] = []
        for digits, prompt, call in calls:
            sequences = call.result().sequences
            texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in sequences]
            group = [reverse_reward(text, digits[::-1]) for text in texts]
            mean = sum(group) / len(group)
            data += [
                datum(prompt, sequence, score - mean)
                for sequence, score in zip(sequences, group, strict=True)
            ]
            scores += group
        learning = client.forward_backward(data, "importance_sampling")
        stepping = client.optim_step(adam)
        outputs = learning.result().loss_fn_outputs
        stepping.result()
        worst = max(worst, difference(data, outputs))
        rewards.append(sum(scores) / len(scores))
        mark()
    wall, cpu, served = (
        [after - before for before, after in itertools.pairwise(column)]
        for column in zip(*marks, strict=True)
    )
    result = {"wall": wall, "cpu": cpu, "served_cpu": served, "reward": rewards,
              "mismatch": worst}  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then the SDK's transport aborts while the interpreter ends
