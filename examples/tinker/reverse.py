"""Reinforcement learning with the Tinker SDK on a laptop: the bundled model reverses digits.

    lockstep tinker tiny
    export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
    python examples/tinker/reverse.py

It needs `pip install tinker torch` and nothing of Lockstep. Each step samples groups of answers,
takes the group's mean from their rewards, and learns from all of them in one call.
"""

from __future__ import annotations

import argparse
import os
import random
import sys

import tinker
from tinker import types


def reward(task: str, answer: str) -> float:
    """The share of digits at their right places, if the answer has as many as the task."""
    wanted = task[::-1]
    if len(answer) != len(wanted):
        return 0.0
    return sum(one == other for one, other in zip(wanted, answer, strict=True)) / len(wanted)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args()
    service = tinker.ServiceClient()
    model, *_ = service.get_server_capabilities().supported_models
    client = service.create_lora_training_client(model.model_name, rank=16, seed=0)
    tokenizer = client.get_tokenizer()
    digits = random.Random(0)
    params = types.SamplingParams(max_tokens=10, stop=[tokenizer.eos_token_id])
    for step in range(options.steps):
        sampler = client.save_weights_and_get_sampling_client()
        calls = []
        for _ in range(options.groups):
            task = "".join(digits.choices("0123456789", k=5))
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"Reverse: {task}"}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=False,
            )
            prompt = tokenizer.encode(text, add_special_tokens=False)
            model_input = types.ModelInput.from_ints(prompt)
            calls.append((task, prompt, sampler.sample(model_input, options.group_size, params)))
        data, rewards = [], []
        for task, prompt, call in calls:
            sequences = call.result().sequences
            answers = [
                tokenizer.decode(each.tokens, skip_special_tokens=True) for each in sequences
            ]
            scores = [reward(task, answer.strip()) for answer in answers]
            rewards += scores
            mean = sum(scores) / len(scores)
            for sequence, score in zip(sequences, scores, strict=True):
                data.append(datum(prompt, sequence, score - mean))
        learning = client.forward_backward(data, "importance_sampling")
        client.optim_step(types.AdamParams(learning_rate=options.learning_rate, eps=1e-8)).result()
        outputs = learning.result().loss_fn_outputs
        print(
            f"step {step + 1}: reward {sum(rewards) / len(rewards):.3f}, "
            f"trainer and sampler differ by {difference(data, outputs):g}",
            flush=True,
        )
    print(client.save_state("last").result().path, flush=True)


def datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """A sampled answer to learn from: position i predicts token i + 1."""
    tokens = [*prompt, *sequence.tokens]
    before, count = len(prompt) - 1, len(sequence.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + list(sequence.logprobs),
            "advantages": [0.0] * before + [advantage] * count,
        },
    )


def difference(data: list[types.Datum], outputs: list[types.LossFnOutput]) -> float:
    """By how much the logprobs of trainer and sampler differ at most, over all sampled tokens."""
    pairs = (
        pair
        for one, output in zip(data, outputs, strict=True)
        for pair in zip(
            one.loss_fn_inputs["logprobs"].tolist(), output["logprobs"].tolist(), strict=True
        )
    )
    worst: float = max(abs(trained - sampled) for sampled, trained in pairs if sampled)
    return worst


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then the SDK's transport aborts while the interpreter ends
